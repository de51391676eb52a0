"""The commands of `autotune db` with their options."""

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Database, Job, only_database
from autotune.cli.status import end

app = typer.Typer(help="Move jobs between databases, back up, restore, check, remove old logs.", no_args_is_help=True)

Out = Annotated[Path | None, typer.Option(metavar="FILE", help="A file, packed if it ends in .gz. [default: standard output]")]
In = Annotated[Path, typer.Argument(metavar="FILE", help="A file written by the corresponding command; - for standard input.")]
Owner = Annotated[str, typer.Option(metavar="NAME", help="Owner of the job in this database. [default: none]")]


@app.command("export")
def export_job(job: Job = None, out: Out = None, db: Database = None) -> None:
    """Write a job with its trials, attempts, measurements and events as JSON Lines."""
    from autotune.cli.database import dump_command

    end(lambda: dump_command(job, False, out, only_database("db export", db)))


@app.command("import")
def import_job(file: In, owner: Owner = "", db: Database = None) -> None:
    """Import a job from a file; an unfinished job can then be resumed."""
    from autotune.cli.database import import_command

    end(lambda: import_command(file, owner, only_database("db import", db)))


@app.command()
def backup(out: Out = None, db: Database = None) -> None:
    """Write a consistent snapshot of the database while it is in use. It contains key hashes and encrypted secrets."""
    from autotune.cli.database import dump_command

    end(lambda: dump_command(None, True, out, only_database("db backup", db)))


@app.command()
def restore(file: In, db: Database = None) -> None:
    """Restore a backup into a database of either kind without jobs; the next worker resumes jobs that were running."""
    from autotune.cli.database import restore_command

    end(lambda: restore_command(file, only_database("db restore", db)))


@app.command()
def check(db: Database = None) -> None:
    """List the rows that cannot be read. Other jobs are not affected."""
    from autotune.cli.database import check_command

    end(lambda: check_command(only_database("db check", db)))


@app.command()
def prune(
    days: Annotated[float, typer.Option(min=0, metavar="N", help="Keep the logs of jobs that ended within this many days.")],
    db: Database = None,
) -> None:
    """Remove events, trials' output, deliveries and submission keys of jobs that ended long ago. Trials and results stay."""
    from autotune.cli.database import prune_command

    end(lambda: prune_command(days, only_database("db prune", db)))
