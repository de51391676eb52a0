"""`autotune show`: a job, or the newest ones."""

import json
import sys

from rich.console import Console
from rich.table import Table

from autotune.cli.result import print_result
from autotune.cli.rows import add_trial_row, trial_table
from autotune.cli.sizes import duration_text
from autotune.cli.status import Status
from autotune.jobs.book import Book, read_book
from autotune.jobs.session import session_of
from autotune.tuning import result_of
from search_spaces.plain import to_plain
from storage.sql import default_database_url, open_store


def show_command(job_id: str | None, database: str | None, as_json: bool) -> Status:
    """State, trials and best of one job."""
    with open_store(database or default_database_url()) as store:
        book = read_book(store, store.job(job_id).id)
    session = session_of(book.job)
    result = result_of(session, book)
    if as_json:
        sys.stdout.write(json.dumps(_document(book, result.best_config), indent=2) + "\n")
        return Status.OK
    console = Console()
    job = book.job
    console.print(
        f"job {job.id}: {job.state.value.lower()}{f' ({job.reason})' if job.reason else ''}, "
        f"{session.model.name} on {session.cluster.name} with {session.world_size} ranks, {book.spent} trials in "
        f"{duration_text(job.active_seconds)}, opened {job.created:%Y-%m-%d %H:%M} UTC",
        highlight=False,
        soft_wrap=True,
    )
    if job.message:
        console.print(f"  {job.message}", highlight=False, soft_wrap=True)
    _print_trials(book, console, result.best_config)
    print_result(result.best_config, console)
    return Status.OK


def list_command(database: str | None, as_json: bool) -> Status:
    """The newest jobs."""
    with open_store(database or default_database_url()) as store:
        jobs = store.jobs()
    if as_json:
        rows = [{"id": job.id, "state": job.state, "reason": job.reason, "model": job.request.get("model")} for job in jobs]
        sys.stdout.write(json.dumps(to_plain(rows), indent=2) + "\n")
        return Status.OK
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("job", "state", "reason", "model", "opened (UTC)"):
        table.add_column(name)
    for job in jobs:
        opened = f"{job.created:%Y-%m-%d %H:%M}"
        table.add_row(job.id, job.state.value.lower(), job.reason, str(job.request.get("model")), opened)
    Console().print(table, highlight=False)
    return Status.OK


def _print_trials(book: Book, console: Console, best: dict[str, object] | None) -> None:
    session = session_of(book.job)
    number = best["best"]["trial"] if best else None  # type: ignore[index]
    table = trial_table()
    for trial in book.trials:
        add_trial_row(table, session, trial, best=trial.number == number, state="wanted")
    console.print(table, highlight=False)
    for trial in book.trials:
        if trial.result is not None and trial.result.message:
            console.print(f"  trial {trial.number}: {trial.result.message}", highlight=False, soft_wrap=True)


def _document(book: Book, best: dict[str, object] | None) -> dict[str, object]:
    job = book.job
    return {
        "job": {
            "id": job.id, "state": job.state.value, "reason": job.reason, "message": job.message,
            "created": job.created.isoformat(), "active_seconds": job.active_seconds, "request": dict(job.request),
        },
        "trials": [
            {
                "number": trial.number, "purpose": trial.purpose.value, "repeat": trial.repeat, "counted": trial.counted,
                "outcome": trial.outcome.value if trial.outcome else None, "config": trial.config.values(),
                "result": to_plain(trial.result),
            }
            for trial in book.trials
        ],
        "best_config": best,
    }  # fmt: skip
