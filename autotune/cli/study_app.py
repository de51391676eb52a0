"""The commands of `autotune study` with their options."""

from typing import Annotated

import typer

from autotune.cli.options import Database, Job, Url
from autotune.cli.status import end

app = typer.Typer(help="Export jobs as Optuna studies.", no_args_is_help=True)


@app.command("export")
def export_study(
    storage: Annotated[str, typer.Option(metavar="URL", help="Optuna storage, such as sqlite:///studies.db.")],
    job: Job = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the study. [default: the job's id]")] = None,
    url: Url = None,
    db: Database = None,
) -> None:
    """Write a job as an Optuna study, for example for optuna-dashboard; prints its name to standard output."""
    from autotune.cli.study import study_command

    end(lambda: study_command(job, storage, name, url, db))
