"""The commands of `autotune study` with their options."""

from typing import Annotated

import typer

from autotune.cli.options import Database, Job, Url
from autotune.cli.status import end

app = typer.Typer(help="Jobs as studies of Optuna's.", no_args_is_help=True)


@app.command("export")
def export_study(
    storage: Annotated[str, typer.Option(metavar="URL", help="Optuna's storage, such as sqlite:///studies.db.")],
    job: Job = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The study's name. [default: the job's id]")] = None,
    url: Url = None,
    db: Database = None,
) -> None:
    """Write a job as an Optuna study, which optuna-dashboard shows; standard output has its name."""
    from autotune.cli.study import study_command

    end(lambda: study_command(job, storage, name, url, db))
