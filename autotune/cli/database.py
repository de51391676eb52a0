"""`autotune db`: export jobs to files, back up, and remove old data; `autotune clean`."""

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
from typing import TextIO

import typer

from autotune.cli.status import Status
from autotune.errors import AutotuneError, OutputError, RequestError
from autotune.ops.output import require_writable
from autotune.request.rows import request_from_row
from autotune.text.console import Console
from autotune.text.jobs import state_word
from autotune.text.visible_text import visible
from search_spaces.errors import SearchSpaceError
from storage.address import default_database_url
from storage.errors import LeaseHeldError, StorageError
from storage.records import JobRecord
from storage.service_records import Damage
from storage.store import Store, open_store

PART = 1 << 20
"""Characters per copy."""


def dump_command(job_id: str | None, every: bool, out: Path | None, database: str | None) -> Status:
    """Write a job, or everything, as JSON Lines to a file or to standard output."""
    if out is not None:
        require_writable(out)
    with open_store(database or default_database_url()) as store:
        job = None if every else store.jobs.get(job_id).id
        with _sink(out) as sink:
            count = store.transfer.dump(sink, job)
    subject = "everything" if job is None else f"job {job}"
    Console(stderr=True).print(
        f"wrote {subject} ({count:,} rows){f' to {out}' if out else ''}", highlight=False, soft_wrap=True
    )
    return Status.OK


def import_command(path: Path, owner: str, database: str | None) -> Status:
    """Import a job from a file, completely or not at all."""
    with _source(path) as source, open_store(database or default_database_url()) as store:
        job = store.transfer.load_job(source, owner)
    Console(stderr=True).print(f"read job {job} from {path}", highlight=False, soft_wrap=True)
    return Status.OK


def restore_command(path: Path, database: str | None) -> Status:
    """Restore a backup, completely or not at all."""
    with _source(path) as source, open_store(database or default_database_url()) as store:
        jobs = store.transfer.load(source)
    Console(stderr=True).print(f"read {len(jobs):,} jobs from {path}", highlight=False, soft_wrap=True)
    return Status.OK


def check_command(database: str | None) -> Status:
    """Print every row that cannot be read."""
    with open_store(database or default_database_url()) as store:
        lines = list(_lines(store, store.maintenance.damages()))
    for line in lines:
        typer.echo(visible(line))
    summary = (
        f"{len(lines):,} rows are damaged; restore them from a backup, or remove their jobs with `autotune clean JOB --yes`"
    )
    Console(stderr=True).print(summary if lines else "every row can be read", highlight=False, soft_wrap=True)
    return Status.FAILURE if lines else Status.OK


def clean_command(job_id: str | None, every: bool, yes: bool, database: str | None) -> Status:
    """Remove one job, or all; a job whose lease a live process holds is kept."""
    console, status = Console(stderr=True), Status.OK
    with open_store(database or default_database_url()) as store:
        for job in _every_job(store) if every else [store.jobs.get(job_id)]:
            if not yes:
                word = state_word(job.state, job.reason)
                console.print(f"would remove job {job.id} ({word}); add --yes to do it", highlight=False)
                continue
            try:
                store.jobs.delete(job.id)
            except LeaseHeldError as error:
                console.print(f"kept job {job.id}: {error}", highlight=False, soft_wrap=True)
                status = Status.FAILURE
            else:
                console.print(f"removed job {job.id}", highlight=False)
    return status


def _lines(store: Store, damages: Sequence[Damage]) -> Iterator[str]:
    """Damaged rows, and jobs whose requests this version cannot read."""
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


def prune_command(days: float, database: str | None) -> Status:
    """Remove the logs of jobs that ended longer ago."""
    with open_store(database or default_database_url()) as store:
        pruned = store.maintenance.prune(datetime.now(UTC) - timedelta(days=days))
    removed = f"{pruned.events:,} events, {pruned.logs:,} parts of trials' output, {pruned.deliveries:,} deliveries, "
    removed += f"{pruned.submissions:,} submission keys, {pruned.calibrations:,} replaced calibrations"
    Console(stderr=True).print(f"removed {removed}; jobs, trials and results stay", highlight=False, soft_wrap=True)
    return Status.OK


@contextlib.contextmanager
def _sink(out: Path | None) -> Iterator[TextIO]:
    """A seekable file that is moved to `out` or copied to standard output once it is complete."""
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
    if out is None:
        shutil.copyfileobj(file, sys.stdout, PART)
        sys.stdout.flush()
        return
    if out.suffix == ".gz":
        with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".autotune-", delete=False) as packed:
            with gzip.open(packed, "wt", encoding="utf-8") as text:
                shutil.copyfileobj(file, text, PART)
            packed.flush()
            os.fsync(packed.fileno())
        Path(packed.name).replace(path)
    else:
        os.fsync(file.fileno())
    path.replace(out)


@contextlib.contextmanager
def _source(path: Path) -> Iterator[TextIO]:
    """The file as seekable text; `-` is standard input."""
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


def _every_job(store: Store) -> list[JobRecord]:
    jobs: list[JobRecord] = []
    while page := store.jobs.newest(before=jobs[-1].id if jobs else None):
        jobs += page
    return jobs
