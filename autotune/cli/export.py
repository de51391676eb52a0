"""`autotune export`: a job's best configuration in a framework's format."""

import sys
from pathlib import Path

from rich.console import Console

from autotune.cli.status import Status
from autotune.errors import NoBestError
from autotune.exports import exporter
from autotune.jobs.book import read_book
from autotune.jobs.session import session_of
from autotune.output import require_writable, write_whole
from autotune.tuning import result_of
from storage.sql import default_database_url, open_store


def export_command(job_id: str | None, format_name: str, out: Path | None, database: str | None) -> Status:
    """The file on standard output or at `out`; what the format cannot say on standard error."""
    make = exporter(format_name)
    if out is not None:
        require_writable(out)
    with open_store(database or default_database_url()) as store:
        book = read_book(store, store.job(job_id).id)
    document = result_of(session_of(book.job), book).best_config
    if document is None:
        raise NoBestError("job", f"{book.job.id} has no configuration that may win", "look at `autotune show`")
    made = make(document)
    if out is None:
        sys.stdout.write(made.text)
    else:
        write_whole(out, made.text)
    for note in made.notes:
        Console(stderr=True).print(f"note: {note}", highlight=False, soft_wrap=True)
    return Status.OK
