"""Commands that take a question: those that open tuning jobs, and those that predict. See `app`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli import options
from autotune.cli.options import DEFAULT_OUT, Database, Json, SweepOfWays, SweepOptions, Url, WantedFile
from autotune.cli.question_options import KEY, QuestionCommand, asked_values, given_fields
from autotune.cli.status import Status, print_note
from autotune.errors import RequestError
from autotune.question.field import Panel

tuning_app = typer.Typer()


@tuning_app.command(cls=QuestionCommand)
def sweep(
    context: typer.Context,
    price: Annotated[
        float | None,
        typer.Option(
            metavar="PRICE", help="Price of a device per hour, for the objective cost.", rich_help_panel=Panel.SERIES.value
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="RATE", help="Samples/s to reach, for the objective devices.", rich_help_panel=Panel.SERIES.value),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Resolution in tokens of the objective sequence. [default: 128]",
            rich_help_panel=Panel.SERIES.value,
        ),
    ] = None,
    trial_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Maximum seconds of timed steps in a trial. [default: 5]",
            rich_help_panel=Panel.TRIALS.value,
        ),
    ] = None,
    from_: options.From = None,
    set_: options.Set = None,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Output file of the best configuration.", rich_help_panel=Panel.BASIC.value)
    ] = DEFAULT_OUT,
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
    inside: Annotated[
        bool,
        typer.Option(
            "--inside",
            help="The command after -- is your whole run, of a Trainer: it tunes itself in its own steps.",
            rich_help_panel=Panel.SCRIPT.value,
        ),
    ] = False,
    share: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="With --inside: part of the run's time that the search may cost. [default: 0.01]",
            rich_help_panel=Panel.SCRIPT.value,
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
            inside=inside,
            share=share,
            database=options.only_database("sweep", db, "submit the job with `autotune submit`, "),
            json=json,
        )
    )


@tuning_app.command(cls=QuestionCommand)
def check(context: typer.Context, config: options.Config = None, json: Json = False) -> Status:
    """Run your script's baseline for ten steps, and say what was understood: its step, what it reads, what a trial writes."""
    from autotune.cli.check import check_command

    return check_command(given_fields(context), config, json)


@tuning_app.command(cls=QuestionCommand)
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


@tuning_app.command(cls=QuestionCommand)
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
    from autotune.cli.fields import request_fields
    from autotune.cli.jobs import print_submitted
    from autotune.cli.open_backend import open_backend
    from autotune.cli.watch import watch_job

    if watch and json:
        raise RequestError("json", "prints one document, but --watch prints events", "leave one of them out")
    fields = request_fields(given_fields(context), config)
    if from_ is not None:
        from autotune.cli.imported import with_imported

        ranks = () if fields.get("ranks") is None else (int(fields["ranks"]),)
        fields = with_imported(fields, from_, set_ or (), ranks, lambda line: print(line, file=sys.stderr))  # noqa: T201
    if isinstance(fields.get("knowledge"), str):
        from autotune.session.knowledge import knowledge_content

        fields["knowledge"] = knowledge_content(fields["knowledge"], print_note, db)
    with open_backend(url, db) as backend:
        job = backend.submit(fields, priority)
        if watch:
            return watch_job(backend, job)
    print_submitted(job, json)
    return Status.OK


planning_app = typer.Typer()
Export = Annotated[str | None, typer.Option(metavar="FORMAT", help="Print it in a format of `autotune export` instead.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Seconds after which it is killed.")]


@planning_app.command(cls=QuestionCommand)
def predict(
    context: typer.Context,
    stages: Annotated[bool, typer.Option("--stages", help="Also show the memory of every pipeline rank.")] = False,
    export: Export = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Predict step time and memory of one configuration, without running it."""
    from autotune.cli.predict import predict_command

    return predict_command(given_fields(context), db, stages=stages, json=json, export=export)


@planning_app.command(cls=QuestionCommand)
def plan(
    context: typer.Context,
    ties: Annotated[bool, typer.Option("--ties", help="Also show the configurations that tie with each plan.")] = False,
    export: Export = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Rank all configurations of a space by predictions, with the reason for each knob, without running them."""
    from autotune.cli.plan import plan_command

    return plan_command(given_fields(context), db, ties=ties, json=json, export=export)


@planning_app.command(cls=QuestionCommand)
def fit(
    context: typer.Context,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="PROGRAM", help="Write the fastest way's file: trl, trainer, axolotl, llamafactory, accelerate, …"
        ),
    ] = None,
    dataset: Annotated[str, typer.Option(metavar="NAME", help="Dataset in the file of --for.")] = "DATASET",
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Your recipe of the Trainer, TRL, Axolotl or LLaMA-Factory: what it trains."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File of --for. [default: standard output]")] = None,
    measure: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=64,
            metavar="N",
            help="Run N of the ways on this machine, the promising first, and write the file of the fastest. Your own command "
            "comes after --, with {file} for the file of --for.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file with further fields of the sweep of --measure.")
    ] = None,
    pass_environment: Annotated[
        list[str] | None,
        typer.Option(
            "--pass-environment", metavar="NAME", help="A variable of the environment for --measure. May be repeated."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Show every way, not only the best of each method.")] = False,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Say which ways of fine-tuning a model fit on your cards, with which batch, how fast, and how long they take."""
    from autotune.cli.fit import fit_command

    file = None if for_ is None else WantedFile(format=for_, dataset=dataset, out=out)
    sweep = None
    words = tuple((context.obj or {}).get(KEY, ()))
    if measure is not None:
        sweep = SweepOfWays(trials=measure, words=words, config=config, environment=tuple(pass_environment or ()))
    elif words or config is not None:
        raise RequestError("command" if words else "config", "is for --measure alone", "give --measure 8, or leave it out")
    return fit_command(given_fields(context), db, recipe=from_, file=file, sweep=sweep, every=every, json=json)


@planning_app.command(cls=QuestionCommand)
def calibrate(
    context: typer.Context,
    runner: Annotated[str, typer.Option(metavar="NAME", help="ray or local.")] = "ray",
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Approximate duration of the measurement.")] = 20.0,
    timeout: Timeout = 300.0,
    force: Annotated[bool, typer.Option("--force", help="Measure even if this cluster was measured before.")] = False,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Measure this cluster for predictions: matrix products, memory, collectives. The measurement is reused afterwards."""
    from autotune.cli.calibrate import calibrate_command

    asked = asked_values(context)
    return calibrate_command(db, json, **asked, runner=runner, seconds=seconds, timeout=timeout, force=force)


@planning_app.command("dry-run", cls=QuestionCommand)
def dry_run(context: typer.Context, timeout: Timeout = 300.0, json: Json = False) -> Status:
    """Compute memory, FLOPs and traffic of a configuration on any cluster, without its hardware; status 3: does not fit."""
    from autotune.cli.dry_run import DryRunOptions, dry_run_command

    values = asked_values(context)
    asked = values | {"cluster": values["cluster"] or "local"}
    return dry_run_command(DryRunOptions(**asked, timeout=timeout, json=json))
