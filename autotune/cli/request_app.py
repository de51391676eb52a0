"""Commands that open tuning jobs: `sweep`, `scale` and `submit`. See `app`."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import options
from autotune.cli.options import DEFAULT_OUT, Database, Json, SweepOptions, Url
from autotune.cli.question_options import QuestionCommand, given_fields
from autotune.cli.status import Status
from autotune.question.field import Panel

request_app = typer.Typer()
Out = Annotated[
    Path, typer.Option(metavar="FILE", help="Output file of the best configuration.", rich_help_panel=Panel.BASIC.value)
]


@request_app.command(cls=QuestionCommand)
def sweep(
    context: typer.Context,
    price: options.Price = None,
    rate: options.Rate = None,
    step: options.Step = None,
    trial_seconds: options.TrialSeconds = None,
    from_: options.From = None,
    set_: options.Set = None,
    out: Out = DEFAULT_OUT,
    pass_environment: options.PassEnvironment = None,
    config: options.Config = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="JOB",
            help="Resume a job, or `latest`. With --trials N, also one that has succeeded.",
            rich_help_panel=Panel.BASIC.value,
        ),
    ] = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Tune a model by real trials and write the best configuration as JSON. For your own script, add its command after --."""
    from autotune.cli.sweep import sweep_command

    fidelity = None if trial_seconds is None else {"max_seconds": trial_seconds}
    return sweep_command(
        SweepOptions(
            fields=given_fields(context) | options.given(fidelity=fidelity),
            series=options.given(price=price, rate=rate, step=step),
            imported=from_,
            stated=tuple(set_ or ()),
            out=out,
            pass_environment=tuple(pass_environment or ()),
            config=config,
            resume=resume,
            database=options.only_database("sweep", db, "submit the job with `autotune submit`, "),
            json=json,
        )
    )


@request_app.command(cls=QuestionCommand)
def check(context: typer.Context, config: options.Config = None, json: Json = False) -> Status:
    """Run your script's baseline for ten steps, and say what was understood: its step, what it reads, what a trial writes."""
    from autotune.cli.check import check_command

    return check_command(given_fields(context), config, json)


@request_app.command(cls=QuestionCommand)
def scale(
    context: typer.Context,
    ranks: Annotated[
        str,
        typer.Option(metavar="N,N", help="Numbers of ranks to sweep, one after the other.", rich_help_panel=Panel.BASIC.value),
    ] = "1,2,4",
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Output file of the fastest size's configuration.", rich_help_panel=Panel.BASIC.value
        ),
    ] = DEFAULT_OUT,
    config: options.Config = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Sweep a model on 1, 2, 4 ranks: samples/s and efficiency of each size, and where more ranks reduce throughput."""
    from autotune.cli.sweep import sweep_command

    return sweep_command(
        SweepOptions(
            fields=given_fields(context) | {"ranks": ranks, "objective": "scale"},
            series={},
            out=out,
            config=config,
            resume=None,
            imported=None,
            database=options.only_database("scale", db),
            json=json,
        )
    )


@request_app.command(cls=QuestionCommand)
def submit(
    context: typer.Context,
    from_: options.From = None,
    set_: options.Set = None,
    config: options.Config = None,
    priority: Annotated[
        int,
        typer.Option(
            min=-100, max=100, metavar="N", help="Jobs with higher priority run first.", rich_help_panel=Panel.JOB.value
        ),
    ] = 0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the job until it ends.", rich_help_panel=Panel.JOB.value)
    ] = False,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Submit a tuning job to the workers; prints its id to standard output."""
    from autotune.cli.submit import SubmitOptions, submit_command

    return submit_command(
            SubmitOptions(
                fields=given_fields(context), imported=from_, stated=tuple(set_ or ()),
                config=config, priority=priority, watch=watch, url=url, database=db, json=json,
            )
        )  # fmt: skip
