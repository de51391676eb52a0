"""Commands that predict: the cost of a configuration, the best configurations, and prediction accuracy. See `app`."""

from typing import Annotated

import typer

from autotune.cli.options import Database, Json
from autotune.cli.question_options import QuestionCommand, asked_values, given_fields
from autotune.cli.status import Status

app = typer.Typer()
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Seconds after which it is killed.")]


@app.command(cls=QuestionCommand)
def predict(
    context: typer.Context,
    stages: Annotated[bool, typer.Option("--stages", help="Also show the memory of every pipeline rank.")] = False,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Predict step time and memory of one configuration, without running it."""
    from autotune.cli.predict import predict_command

    return predict_command(given_fields(context), db, stages=stages, json=json)


@app.command(cls=QuestionCommand)
def plan(
    context: typer.Context,
    ties: Annotated[bool, typer.Option("--ties", help="Also show the configurations that tie with each plan.")] = False,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Rank all configurations of a space by predictions, with the reason for each knob, without running them."""
    from autotune.cli.plan import plan_command

    return plan_command(given_fields(context), db, ties=ties, json=json)


@app.command(cls=QuestionCommand)
def capacity(context: typer.Context, db: Database = None, json: Json = False) -> Status:
    """Predict the ZeRO stage and offloading that a model needs, and the largest micro-batch and sequence that then fit."""
    from autotune.cli.capacity import capacity_command

    return capacity_command(given_fields(context), db, json=json)


@app.command(cls=QuestionCommand)
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


@app.command("dry-run", cls=QuestionCommand)
def dry_run(context: typer.Context, timeout: Timeout = 300.0, json: Json = False) -> Status:
    """Compute memory, FLOPs and traffic of a configuration on any cluster, without its hardware; status 3: does not fit."""
    from autotune.cli.dry_run import DryRunOptions, dry_run_command

    values = asked_values(context)
    asked = values | {"cluster": values["cluster"] or "local"}
    return dry_run_command(DryRunOptions(**asked, timeout=timeout, json=json))
