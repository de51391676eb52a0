"""Jobs in files and other databases: `autotune db`, `autotune clean`, `autotune study`."""

import contextlib
import gzip
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from autotune.cli.options import Database, Job, Url, only_database
from autotune.cli.status import Status, print_line
from autotune.errors import AutotuneError, OutputError, RequestError
from autotune.output import require_writable
from autotune.text.visible_text import visible
from search_spaces.errors import SearchSpaceError

if TYPE_CHECKING:
    from storage.records import JobRecord
    from storage.service_records import Damage
    from storage.store import Store

Out = Annotated[Path | None, typer.Option(metavar="FILE", help="A file, packed if it ends in .gz. [default: standard output]")]
In = Annotated[Path, typer.Argument(metavar="FILE", help="A file written by the corresponding command; - for standard input.")]

database_app = typer.Typer(help="Move jobs between databases, back up, restore, check, remove old logs.", no_args_is_help=True)


@database_app.command("export")
def export_job(job: Job = None, out: Out = None, db: Database = None) -> Status:
    """Write a job with its trials, attempts, measurements and events as JSON Lines."""
    return _dump(job, False, out, only_database("db export", db))


@database_app.command("import")
def import_job(
    file: In,
    owner: Annotated[str, typer.Option(metavar="NAME", help="Owner of the job in this database. [default: none]")] = "",
    db: Database = None,
) -> Status:
    """Import a job from a file; an unfinished job can then be resumed."""
    database = only_database("db import", db)
    with _source(file) as source, open_database(database) as store:
        job = store.transfer.load_job(source, owner)
    print_line(f"read job {job} from {file}")
    return Status.OK


@database_app.command()
def backup(out: Out = None, db: Database = None) -> Status:
    """Write a consistent snapshot of the database while it is in use. It contains key hashes and encrypted secrets."""
    return _dump(None, True, out, only_database("db backup", db))


@database_app.command()
def restore(file: In, db: Database = None) -> Status:
    """Restore a backup into a database of either kind without jobs; the next worker resumes jobs that were running."""
    database = only_database("db restore", db)
    with _source(file) as source, open_database(database) as store:
        jobs = store.transfer.load(source)
    print_line(f"read {len(jobs):,} jobs from {file}")
    return Status.OK


@database_app.command()
def check(db: Database = None) -> Status:
    """List the rows that cannot be read. Other jobs are not affected."""
    with open_database(only_database("db check", db)) as store:
        lines = list(_lines(store, store.maintenance.damages()))
    for line in lines:
        typer.echo(visible(line))
    summary = (
        f"{len(lines):,} rows are damaged; restore them from a backup, or remove their jobs with `autotune clean JOB --yes`"
    )
    print_line(summary if lines else "every row can be read")
    return Status.FAILURE if lines else Status.OK


@database_app.command()
def prune(
    days: Annotated[float, typer.Option(min=0, metavar="N", help="Keep the logs of jobs that ended within this many days.")],
    db: Database = None,
) -> Status:
    """Remove events, trials' output, deliveries and submission keys of jobs that ended long ago. Trials and results stay."""
    with open_database(only_database("db prune", db)) as store:
        pruned = store.maintenance.prune(datetime.now(UTC) - timedelta(days=days))
    removed = f"{pruned.events:,} events, {pruned.logs:,} parts of trials' output, {pruned.deliveries:,} deliveries, "
    removed += f"{pruned.submissions:,} submission keys, {pruned.calibrations:,} replaced calibrations"
    print_line(f"removed {removed}; jobs, trials and results stay")
    return Status.OK


def _dump(job_id: str | None, every: bool, out: Path | None, database: str | None) -> Status:
    """Write a job, or everything, as JSON Lines to a file or to standard output."""
    if out is not None:
        require_writable(out)
    with open_database(database) as store:
        job = None if every else store.jobs.get(job_id).id
        with _sink(out) as sink:
            count = store.transfer.dump(sink, job)
    print_line(f"wrote {'everything' if job is None else f'job {job}'} ({count:,} rows){f' to {out}' if out else ''}")
    return Status.OK


def open_database(database: str | None) -> "Store":
    """The database of an option, else the default one."""
    # Imported on demand, as in every function here: `autotune --help` loads nothing heavy.
    from storage.address import default_database_url
    from storage.store import open_store

    return open_store(database or default_database_url())


def clean_command(job_id: str | None, every: bool, yes: bool, database: str | None) -> Status:
    """Remove one job, or all; a job whose lease a live process holds is kept."""
    from autotune.text.console import Console
    from autotune.text.rows import state_word
    from storage.errors import LeaseHeldError

    console, status = Console(stderr=True), Status.OK
    with open_database(database) as store:
        for job in _every_job(store) if every else [store.jobs.get(job_id)]:
            if not yes:
                word = state_word(job.state, job.reason)
                console.print(f"would remove job {job.id} ({word}); add --yes to do it")
                continue
            try:
                store.jobs.delete(job.id)
            except LeaseHeldError as error:
                console.print(f"kept job {job.id}: {error}", soft_wrap=True)
                status = Status.FAILURE
            else:
                console.print(f"removed job {job.id}")
    return status


def _lines(store: "Store", damages: Sequence["Damage"]) -> Iterator[str]:
    """Damaged rows, and jobs whose requests this version cannot read."""
    from autotune.request.rows import request_from_row

    yield from (f"{damage.place}: {damage.problem}" for damage in damages)
    before = None
    while page := store.jobs.newest(before=before):
        before = page[-1].id
        for job in page:
            try:
                if not job.damage:
                    request_from_row(job.request)
            except (AutotuneError, SearchSpaceError) as error:
                yield f"jobs {job.id}: {error}"


@contextlib.contextmanager
def _sink(out: Path | None) -> Iterator[TextIO]:
    """A seekable file that is moved to `out` or copied to standard output once it is complete."""
    from storage.errors import StorageError

    try:
        # It may contain key hashes and webhook secrets, so only its owner can read it, as mkstemp ensures.
        handle, name = tempfile.mkstemp(prefix=".autotune-", dir=None if out is None else out.absolute().parent)
        temporary = Path(name)
        try:
            with os.fdopen(handle, "w+", encoding="utf-8") as file:
                yield file
                file.flush()
                _publish(file, temporary, out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, BrokenPipeError | StorageError):
            raise
        problem = f"{out or 'a temporary file'} cannot be written ({error.strerror})"
        raise OutputError("out", problem, "free some space") from error


def _publish(file: TextIO, path: Path, out: Path | None) -> None:
    file.seek(0)
    # Characters per copy.
    part = 1 << 20
    if out is None:
        shutil.copyfileobj(file, sys.stdout, part)
        sys.stdout.flush()
        return
    if out.suffix == ".gz":
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".autotune-", delete=False) as packed:
            with gzip.open(packed, "wt", encoding="utf-8") as text:
                shutil.copyfileobj(file, text, part)
            packed.flush()
            os.fsync(packed.fileno())
        Path(packed.name).replace(path)
    else:
        os.fsync(file.fileno())
    path.replace(out)


@contextlib.contextmanager
def _source(path: Path) -> Iterator[TextIO]:
    """The file as seekable text; `-` is standard input."""
    from storage.errors import StorageError

    if str(path) == "-":
        yield io.StringIO(sys.stdin.read())
        return
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield file
    except (OSError, EOFError, UnicodeDecodeError) as error:
        if isinstance(error, StorageError):
            raise
        raise RequestError("file", f"{path} cannot be read ({error})", "give a file that `autotune db` wrote") from error


def _every_job(store: "Store") -> list["JobRecord"]:
    jobs: list[JobRecord] = []
    while page := store.jobs.newest(before=jobs[-1].id if jobs else None):
        jobs += page
    return jobs


study_app = typer.Typer(help="Export jobs as Optuna studies.", no_args_is_help=True)


@study_app.command("export")
def export_study(
    storage: Annotated[str, typer.Option(metavar="URL", help="Optuna storage, such as sqlite:///studies.db.")],
    job: Job = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the study. [default: the job's id]")] = None,
    url: Url = None,
    db: Database = None,
) -> Status:
    """Write a job as an Optuna study, for example for optuna-dashboard; prints its name to standard output."""
    # Imported on demand, as in every command: `autotune --help` loads nothing heavy.
    from autotune.cli.open_backend import open_backend
    from autotune.frameworks.optuna import write_study

    with open_backend(url, db) as backend:
        record = backend.job(job)
        written = write_study(storage, name or record.id, record, list(backend.trials(record.id)))
    sys.stdout.write(f"{written}\n")
    return Status.OK
