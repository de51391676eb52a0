"""`autotune jobs`, operations on one job (pause, resume, stop, cancel, clone, extend, label)."""

import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from autotune.cli.backend import JobProgress
from autotune.cli.documents import write_document
from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.text.console import Console
from autotune.text.jobs import labels_text, model_text, state_text, state_word
from search_spaces.outcome import JobState
from search_spaces.plain import to_plain
from storage.records import Ask, JobFilter, JobRecord

_NEXT = {
    JobState.QUEUED: "waits for a worker",
    JobState.PAUSING: "its running trials end first",
    JobState.STOPPING: "its running trials end first",
    JobState.CANCELLING: "its running trials are killed",
}
"""State -> what happens next."""


def list_command(
    url: str | None,
    database: str | None,
    states: Collection[str],
    submitter: str | None,
    tags: Collection[str],
    text: str,
    limit: int,
    as_json: bool,
) -> Status:
    """List the newest jobs."""
    having = JobFilter(states=[_state(name) for name in states], submitter=submitter, tags=tags, text=text)
    with open_backend(url, database) as backend:
        jobs = list(backend.jobs(having, limit))
        standings = backend.standings(jobs)
    if as_json:
        write_document(
            [
                job_document(job)
                | {"searched": standing.searched, "gain": to_plain(standing.gain), "keeps_baseline": standing.keeps_baseline}
                for job, standing in zip(jobs, standings, strict=True)
            ]
        )
        return Status.OK
    console = Console()
    console.print(_table(jobs, standings), highlight=False, markup=False)
    if any(map(_is_unproven, standings)):
        console.print("? the interval of the gain includes 1.0: the gain is unproven", style="dim", highlight=False)
    return Status.OK


def _table(jobs: Sequence[JobRecord], standings: Sequence[JobProgress]) -> Table:
    """One row per job. The id contains the opening time. Empty columns are omitted, so that 80 columns suffice."""
    further = {
        "name": [str(job.request.get("name") or "") for job in jobs],
        "tags": [" ".join(job.request.get("tags") or ()) for job in jobs],
        "submitter": [job.submitter for job in jobs],
        "priority": [str(job.priority or "") for job in jobs],
    }
    further = {name: values for name, values in further.items() if any(values)}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("job (UTC)", "state", "model", "trials", "gain", *further):
        fixed = name in ("job (UTC)", "state", "trials", "gain")
        table.add_column(name, no_wrap=fixed, overflow="fold", justify="right" if name in ("trials", "gain") else "left")
    for job, standing, *cells in zip(jobs, standings, *further.values(), strict=True):
        trials = f"{standing.searched}/{job.request.get('trials', '?')}"
        table.add_row(
            job.id, state_word(job.state, job.reason), Text(model_text(job)), trials, _gain_text(standing), *map(Text, cells)
        )
    return table


def _gain_text(standing: JobProgress) -> str:
    if standing.gain is None or standing.keeps_baseline:
        return "keep" if standing.keeps_baseline else ""
    return f"{standing.gain.mean:.2f}x{' ?' if _is_unproven(standing) else ''}"


def _is_unproven(standing: JobProgress) -> bool:
    return not standing.keeps_baseline and standing.gain is not None and standing.gain.low <= 1.0 <= standing.gain.high


def ask_command(
    request: str,
    job: str,
    url: str | None,
    database: str | None,
    as_json: bool,
    budget: Mapping[str, Any] | None = None,
) -> Status:
    """Request a state change of one job; `budget` only with `resume`."""
    _require_seconds((budget or {}).get("max_seconds"))
    with open_backend(url, database) as backend:
        changed = backend.ask(job, Ask(request), budget)
        if changed.state is JobState.QUEUED and backend.runs_jobs and not as_json:
            command = shlex.join(["autotune", "sweep", "--resume", changed.id, *backend.words])
            _print_job(changed, as_json)
            _print_line(f"`autotune worker` starts a worker; or run the job in this terminal:\n  {command}")
            return Status.OK
        return _print_job(changed, as_json)


def label_command(job: str, labels: Mapping[str, Any], url: str | None, database: str | None, as_json: bool) -> Status:
    """Change a job's name, tags or note."""
    if not labels:
        raise RequestError("name", "and --tag and --note are missing", "give one of them, or several")
    with open_backend(url, database) as backend:
        changed = backend.label(job, labels)
    if as_json:
        return _print_job(changed, as_json)
    request = changed.request
    _print_line(f"job {changed.id}: " + (labels_text(request) or "no name, no tags, no note"))
    return Status.OK


def clone_command(job: str, url: str | None, database: str | None, as_json: bool) -> Status:
    """Submit a job's request again."""
    with open_backend(url, database) as backend:
        clone = backend.clone(job)
    print_submitted(clone, as_json)
    return Status.OK


def extend_command(
    job: str, trials: int | None, max_seconds: float | None, url: str | None, database: str | None, as_json: bool
) -> Status:
    """Change the budget of one job."""
    if trials is None and max_seconds is None:
        raise RequestError("trials", "and --max-seconds are missing", "give one of them, or both")
    _require_seconds(max_seconds)
    with open_backend(url, database) as backend:
        changed = backend.extend(job, trials, max_seconds)
    if as_json:
        return _print_job(changed, as_json)
    request = changed.request
    seconds = "" if request.get("max_seconds") is None else f", {request['max_seconds']:g} s"
    _print_line(f"job {changed.id}: {state_text(changed)}; its budget is {request['trials']} trials{seconds}")
    return Status.OK


def print_submitted(job: JobRecord, as_json: bool) -> None:
    """Print only the job's id to standard output, for scripts; the rest goes to standard error."""
    if as_json:
        write_document(job_document(job))
        return
    _print_line(f"job {job.id}: {_state_and_next(job)}")
    sys.stdout.write(job.id + "\n")
    sys.stdout.flush()


def job_document(job: JobRecord) -> dict[str, Any]:
    """A job in the form of `--json`."""
    return {
        "id": job.id, "state": job.state.value, "reason": job.reason, "message": job.message,
        "model": str(job.request.get("model", "")), "submitter": job.submitter, "priority": job.priority,
        "created": job.created.isoformat(), "updated": job.updated.isoformat(), "active_seconds": job.active_seconds,
        "trials": job.request.get("trials"), "max_seconds": job.request.get("max_seconds"),
        "name": job.request.get("name") or "", "tags": list(job.request.get("tags") or ()),
        "note": job.request.get("note") or "",
    }  # fmt: skip


def _require_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds <= 1e9:
        raise RequestError("max_seconds", f"{seconds!r} is not a positive number of seconds", "give seconds above 0")


def _print_job(job: JobRecord, as_json: bool) -> Status:
    if as_json:
        write_document(job_document(job))
    else:
        _print_line(f"job {job.id}: {_state_and_next(job)}")
    return Status.OK


def _state_and_next(job: JobRecord) -> str:
    return f"{state_text(job)}{f', {_NEXT[job.state]}' if job.state in _NEXT else ''}"


def _state(name: str) -> JobState:
    try:
        return JobState(name.upper())
    except ValueError:
        states = ", ".join(state.value.lower() for state in JobState)
        raise RequestError("state", f"{name!r} is not a state of a job", f"use some of {states}") from None


def _print_line(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
