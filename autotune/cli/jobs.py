"""`autotune jobs`, and what is asked of one job: pause, resume, stop, cancel, clone, extend."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from autotune.cli.desk import open_desk
from autotune.cli.show import state_text
from autotune.cli.status import Status
from autotune.errors import RequestError
from search_spaces.outcome import JobState
from storage.records import Ask, JobRecord

_FOLLOWS = {
    JobState.QUEUED: "waits for a worker",
    JobState.PAUSING: "its running trials end first",
    JobState.STOPPING: "its running trials end first",
    JobState.CANCELLING: "its running trials are killed",
}
"""States that something follows upon."""


def list_command(
    url: str | None, database: str | None, states: tuple[str, ...], submitter: str | None, limit: int, as_json: bool
) -> Status:
    """The newest jobs."""
    wanted = [_state(name) for name in states]
    with open_desk(url, database) as desk:
        jobs = list(desk.jobs(wanted, submitter, limit))
    if as_json:
        _write([job_document(job) for job in jobs])
        return Status.OK
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("job", "state", "reason", "model", "submitter", "priority", "opened (UTC)"):
        table.add_column(name, no_wrap=name != "model", overflow="fold")
    for job in jobs:
        table.add_row(
            job.id, job.state.value.lower(), job.reason, str(job.request.get("model", "")), job.submitter or "-",
            str(job.priority), f"{job.created:%Y-%m-%d %H:%M}",
        )  # fmt: skip
    Console().print(table, highlight=False, markup=False)
    return Status.OK


def ask_command(wanted: str, job: str, url: str | None, database: str | None, as_json: bool) -> Status:
    """Ask for a change of one job."""
    with open_desk(url, database) as desk:
        return _told(desk.ask(job, Ask(wanted)), as_json)


def clone_command(job: str, url: str | None, database: str | None, as_json: bool) -> Status:
    """Submit a job's request once more."""
    with open_desk(url, database) as desk:
        made = desk.clone(job)
    tell_submitted(made, as_json)
    return Status.OK


def extend_command(
    job: str, trials: int | None, max_seconds: float | None, url: str | None, database: str | None, as_json: bool
) -> Status:
    """Set the budget of one job."""
    if trials is None and max_seconds is None:
        raise RequestError("trials", "and --max-seconds are missing", "give one of them, or both")
    if max_seconds is not None and not 0 < max_seconds <= 1e9:
        raise RequestError("max_seconds", f"{max_seconds!r} is not a positive number of seconds", "give seconds above 0")
    with open_desk(url, database) as desk:
        changed = desk.extend(job, trials, max_seconds)
    if as_json:
        return _told(changed, as_json)
    request = changed.request
    seconds = "" if request.get("max_seconds") is None else f", {request['max_seconds']:g} s"
    _say(f"job {changed.id}: {state_text(changed)}; its budget is {request['trials']} trials{seconds}")
    return Status.OK


def tell_submitted(job: JobRecord, as_json: bool) -> None:
    """The job's id on standard output, alone, so that a script can take it; the rest on standard error."""
    if as_json:
        _write(job_document(job))
        return
    _say(f"job {job.id}: {_followed(job)}")
    sys.stdout.write(job.id + "\n")
    sys.stdout.flush()


def job_document(job: JobRecord) -> dict[str, Any]:
    """A job as `--json` prints it."""
    return {
        "id": job.id, "state": job.state.value, "reason": job.reason, "message": job.message,
        "model": str(job.request.get("model", "")), "submitter": job.submitter, "priority": job.priority,
        "created": job.created.isoformat(), "updated": job.updated.isoformat(), "active_seconds": job.active_seconds,
        "trials": job.request.get("trials"), "max_seconds": job.request.get("max_seconds"),
    }  # fmt: skip


def _told(job: JobRecord, as_json: bool) -> Status:
    if as_json:
        _write(job_document(job))
    else:
        _say(f"job {job.id}: {_followed(job)}")
    return Status.OK


def _followed(job: JobRecord) -> str:
    return f"{state_text(job)}{f', {_FOLLOWS[job.state]}' if job.state in _FOLLOWS else ''}"


def _state(name: str) -> JobState:
    try:
        return JobState(name.upper())
    except ValueError:
        known = ", ".join(state.value.lower() for state in JobState)
        raise RequestError("state", f"{name!r} is no state of a job", f"use some of {known}") from None


def _say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _write(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
