"""Commands that take a tuning request: `sweep`, `scale` and `submit`.

They are imported on demand, because building their many options takes time; `app` and `jobs_app` have their names and helps.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.options import DEFAULT_OUT, Database, Json, SweepOptions, Url
from autotune.cli.request_options import PanelCommand, with_request_options
from autotune.cli.status import end
from autotune.request.field import Panel

request_app = typer.Typer(rich_markup_mode=None)
Fields = dict[str, Any]
Out = Annotated[
    Path, typer.Option(metavar="FILE", help="Output file of the best configuration.", rich_help_panel=Panel.BASIC.value)
]


@request_app.command(cls=PanelCommand)
@with_request_options("sweep", script=True)
def sweep(
    request: Fields,
    price: options.Price = None,
    rate: options.Rate = None,
    step: options.Step = None,
    pin: options.Pins = None,
    trial_seconds: options.TrialSeconds = None,
    baseline: options.Baseline = None,
    from_: options.From = None,
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
) -> None:
    """Tune a model by real trials and write the best configuration as JSON. For your own script, add its command after --."""
    from autotune.cli.sweep import sweep_command

    fidelity = None if trial_seconds is None else {"max_seconds": trial_seconds}
    end(
        lambda: sweep_command(
            SweepOptions(
                fields=request | options.given(fidelity=fidelity),
                series=options.given(price=price, rate=rate, step=step),
                pins=tuple(pin or ()),
                baseline=baseline,
                imported=from_,
                out=out,
                pass_environment=tuple(pass_environment or ()),
                config=config,
                resume=resume,
                database=options.only_database("sweep", db, "submit the job with `autotune submit`, "),
                json=json,
            )
        )
    )


@request_app.command(cls=PanelCommand)
@with_request_options("scale")
def scale(
    request: Fields,
    ranks: Annotated[
        str,
        typer.Option(metavar="N,N", help="Numbers of ranks to sweep, one after the other.", rich_help_panel=Panel.BASIC.value),
    ] = "1,2,4",
    pin: options.Pins = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Output file of the fastest size's configuration.", rich_help_panel=Panel.BASIC.value
        ),
    ] = DEFAULT_OUT,
    config: options.Config = None,
    db: Database = None,
    json: Json = False,
) -> None:
    """Sweep a model on 1, 2, 4 ranks: samples/s and efficiency of each size, and where more ranks reduce throughput."""
    from autotune.cli.sweep import sweep_command

    end(
        lambda: sweep_command(
            SweepOptions(
                fields=request | {"ranks": ranks, "objective": "scale"},
                series={},
                pins=tuple(pin or ()),
                baseline=None,
                out=out,
                config=config,
                resume=None,
                imported=None,
                database=options.only_database("scale", db),
                json=json,
            )
        )
    )


@request_app.command(cls=PanelCommand)
@with_request_options("submit", script=True)
def submit(
    request: Fields,
    pin: options.Pins = None,
    baseline: options.Baseline = None,
    from_: options.From = None,
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
) -> None:
    """Submit a tuning job to the workers; prints its id to standard output."""
    from autotune.cli.submit import SubmitOptions, submit_command

    end(
        lambda: submit_command(
            SubmitOptions(
                fields=request, pins=tuple(pin or ()), baseline=baseline, imported=from_,
                config=config, priority=priority, watch=watch, url=url, database=db, json=json,
            )
        )
    )  # fmt: skip
