"""`autotune jobs`, operations on one job, and the options of commands that show one, which are in modules of their names."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.options import Database, Job, Json, OneJob, Url
from autotune.cli.status import Status, print_line, write_document
from autotune.errors import RequestError
from search_spaces.outcome import JobState
from search_spaces.quantities import ratio_text

if TYPE_CHECKING:
    from rich.table import Table

    from autotune.cli.backend import JobProgress
    from storage.records import JobRecord

FORMATS = (
    "json", "deepspeed", "accelerate-fsdp", "accelerate-deepspeed", "transformers", "torchtitan", "megatron", "lightning",
    "torch", "ray", "slurm", "torchrun",
)  # fmt: skip
"""Formats of `autotune.frameworks.exporters`, which is not imported for the help."""

jobs_app = typer.Typer()


@jobs_app.command()
def jobs(
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="NAME", help="Jobs in this state, such as running. May be repeated. [default: all]"),
    ] = None,
    submitter: Annotated[str | None, typer.Option(metavar="NAME", help="Jobs of this submitter. [default: all]")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="WORD", help="Jobs with this tag. May be repeated: jobs with all of them."),
    ] = None,
    text: Annotated[
        str, typer.Option(metavar="WORDS", help="Jobs with all these words in their name, note, tags, model, id or message.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum number of jobs.")] = 50,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """List the newest jobs: model, state, trials, gain relative to the baseline."""
    # Imported on demand, as in every function here: `autotune --help` loads nothing heavy.
    from autotune.cli.open_backend import open_backend
    from autotune.text.console import Console
    from search_spaces.plain import to_plain
    from storage.records import JobFilter

    having = JobFilter(states=list(map(_state, state or ())), submitter=submitter, tags=tag or (), text=text)
    with open_backend(url, db) as backend:
        listed = list(backend.jobs(having, limit))
        standings = backend.standings(listed)
    if json:
        write_document(
            [
                job_document(job)
                | {"searched": standing.searched, "gain": to_plain(standing.gain), "keeps_baseline": standing.keeps_baseline}
                for job, standing in zip(listed, standings, strict=True)
            ]
        )
        return Status.OK
    console = Console()
    console.print_table(_table(listed, standings), "priority", "submitter", "tags", "trials")
    reasons: dict[str, list[str]] = {}
    for job, standing in zip(listed, standings, strict=True):
        if standing.waiting:
            reasons.setdefault(standing.waiting, []).append(job.id)
    for reason, ids in reasons.items():
        console.print(f"{ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}: {reason}", style="dim", soft_wrap=True)
    if any(map(_is_unproven, standings)):
        console.print("? the interval of the gain includes 1.0: the gain is unproven", style="dim")
    return Status.OK


@jobs_app.command()
def watch(job: Job = None, url: Url = None, db: Database = None) -> Status:
    """Follow a job until it ends: finished trials and the best so far. Ctrl-C detaches; the job continues."""
    from autotune.cli.open_backend import open_backend
    from autotune.cli.watch import watch_job

    with open_backend(url, db) as backend:
        return watch_job(backend, backend.job(job))


@jobs_app.command()
def show(
    job: Job = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="The N best configurations; with --all or --sort the first N trials. [default: 10; all]"
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every trial with its single measurement, by number.")] = False,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Every trial, by number, samples_per_second, peak_memory_bytes, seconds, or a knob. [default: number]",
        ),
    ] = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Show a job: its state, its configurations, best first, its failures, the best configuration."""
    from autotune.cli.show import show_command

    return show_command(job, top, sort, url, db, json, every)


@jobs_app.command()
def logs(
    job: OneJob,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", min=0, max=2**31 - 1, help="A trial's number.")],
    attempt: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only this attempt. [default: all attempts]")] = None,
    rank: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only this rank. [default: all ranks]")] = None,
    tail: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only the last N lines. [default: all]")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the trial ends, over all its attempts.")
    ] = False,
    url: Url = None,
    db: Database = None,
) -> Status:
    """Print the output of a trial's ranks: the beginning and the end of each attempt."""
    from autotune.cli.watch import logs_command

    return logs_command(job, trial, attempt=attempt, rank=rank, tail=tail, follow=follow, url=url, database=db)


@jobs_app.command()
def explain(
    job: Job = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the report as Markdown instead.")
    ] = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Explain why a job's best configuration is the best: time, memory, each knob, bottlenecks, possible improvements."""
    from autotune.cli.show import explain_command

    return explain_command(job, markdown, url, db, json)


@jobs_app.command()
def report(
    job: Job = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file. [default: standard output, with --format md]")
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="html or md. [default: by FILE's suffix, else html]")
    ] = None,
    url: Url = None,
    db: Database = None,
) -> Status:
    """Write a report of a job as one self-contained HTML file with figures, data and explanation, or as Markdown."""
    from autotune.cli.show import report_command

    return report_command(job, format_, out, url, db)


@jobs_app.command()
def export(
    job: Job = None,
    format_: Annotated[str, typer.Option("--format", metavar="NAME", help=f"{', '.join(FORMATS)}.")] = "json",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Output file. [default: standard output]")] = None,
    url: Url = None,
    db: Database = None,
) -> Status:
    """Write a job's best configuration, or that of a file, in a framework's format."""
    from autotune.cli.show import export_command

    return export_command(job, format_, out, url, db)


@jobs_app.command()
def pause(job: OneJob, url: Url = None, db: Database = None, json: Json = False) -> Status:
    """Pause a job after its running trials have ended, until it is resumed."""
    return _ask("pause", job, url, db, json)


@jobs_app.command()
def resume(
    job: OneJob,
    trials: options.AllTrials = None,
    max_seconds: options.AllSeconds = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Queue a paused or failed job again, or one that gets a larger budget."""
    _require_seconds(max_seconds)
    return _ask("resume", job, url, db, json, options.given(trials=trials, max_seconds=max_seconds))


@jobs_app.command()
def stop(job: OneJob, url: Url = None, db: Database = None, json: Json = False) -> Status:
    """Stop a job after its running trials have ended; the answer is the best so far."""
    return _ask("stop", job, url, db, json)


@jobs_app.command()
def cancel(job: OneJob, url: Url = None, db: Database = None, json: Json = False) -> Status:
    """Kill a job's running trials and end the job."""
    return _ask("cancel", job, url, db, json)


@jobs_app.command()
def clone(job: OneJob, url: Url = None, db: Database = None, json: Json = False) -> Status:
    """Submit a job's request again; prints the new id to standard output."""
    from autotune.cli.open_backend import open_backend

    with open_backend(url, db) as backend:
        print_submitted(backend.clone(job), json)
    return Status.OK


@jobs_app.command()
def extend(
    job: OneJob,
    trials: options.AllTrials = None,
    max_seconds: options.AllSeconds = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Set the total budget of a job that has not ended. Use `resume` for a job that has succeeded."""
    from autotune.cli.open_backend import open_backend
    from autotune.text.rows import state_text

    if trials is None and max_seconds is None:
        raise RequestError("trials", "and --max-seconds are missing", "give one of them, or both")
    _require_seconds(max_seconds)
    with open_backend(url, db) as backend:
        changed = backend.extend(job, trials, max_seconds)
    request = changed.request
    seconds = "" if request.get("max_seconds") is None else f", {request['max_seconds']:g} s"
    budget = f"its budget is {request['trials']} trials{seconds}"
    return _print_job(changed, json, f"{state_text(changed)}; {budget}")


@jobs_app.command()
def label(
    job: OneJob,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Name of the job; '' removes it.")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="WORD", help="A tag that replaces the present ones; '' removes them. May be repeated."),
    ] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="Note about the job; '' removes it.")] = None,
    team: Annotated[str | None, typer.Option(metavar="NAME", help="Team that sees the job; '': none.")] = None,
    url: Url = None,
    db: Database = None,
    json: Json = False,
) -> Status:
    """Change the name, tags, note or team of a job in any state."""
    from autotune.cli.open_backend import open_backend
    from autotune.text.rows import labels_text

    tags = None if tag is None else tuple(word for word in tag if word)
    labels = options.given(name=name, tags=tags, note=note, team=team)
    if not labels:
        raise RequestError("name", "and --tag, --note and --team are missing", "give one of them, or several")
    with open_backend(url, db) as backend:
        changed = backend.label(job, labels)
    return _print_job(changed, json, labels_text(changed.request) or "no name, no tags, no note")


@jobs_app.command()
def share(
    job: OneJob,
    days: Annotated[int, typer.Option(min=1, metavar="N", help="Days that it works.")] = 7,
    url: Url = None,
    db: Database = None,
) -> Status:
    """Make a link that shows a job of a service, and nothing else, to whoever has it; prints it to standard output."""
    from autotune.cli.open_backend import open_backend

    with open_backend(url, db) as backend:
        sys.stdout.write(backend.share(job, days) + "\n")
    return Status.OK


def _table(jobs: Sequence["JobRecord"], standings: Sequence["JobProgress"]) -> "Table":
    """One row per job. The id contains the opening time. Empty columns are omitted, so that 80 columns suffice."""
    from rich.table import Table
    from rich.text import Text

    from autotune.text.rows import model_text, state_word

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


def _gain_text(standing: "JobProgress") -> str:
    if standing.gain is None or standing.keeps_baseline:
        return "keep" if standing.keeps_baseline else ""
    return f"{ratio_text(standing.gain.mean)}{' ?' if _is_unproven(standing) else ''}"


def _is_unproven(standing: "JobProgress") -> bool:
    return not standing.keeps_baseline and standing.gain is not None and standing.gain.low <= 1.0 <= standing.gain.high


def _ask(
    request: str, job: str, url: str | None, database: str | None, as_json: bool, budget: Mapping[str, Any] | None = None
) -> Status:
    """Request a state change of one job; `budget` only with `resume`."""
    from autotune.cli.open_backend import open_backend
    from storage.records import Ask

    with open_backend(url, database) as backend:
        changed = backend.ask(job, Ask(request), budget)
        _print_job(changed, as_json, _state_and_next(changed))
        if changed.state is JobState.QUEUED and backend.runs_jobs and not as_json:
            command = shlex.join(["autotune", "sweep", "--resume", changed.id, *backend.words])
            print_line(f"`autotune worker` starts a worker; or run the job in this terminal:\n  {command}")
    return Status.OK


def print_submitted(job: "JobRecord", as_json: bool) -> None:
    """Print only the job's id to standard output, for scripts; the rest, such as what was assumed, goes to standard error."""
    from autotune.question.assumption import assumed_document, assumed_lines
    from autotune.request.rows import assumed_of_row

    assumed = assumed_of_row(job.request)
    if as_json:
        write_document(job_document(job) | {"assumed": assumed_document(assumed)})
        return
    for line in assumed_lines(assumed):
        print_line(line)
    _print_job(job, as_json, _state_and_next(job))
    sys.stdout.write(job.id + "\n")
    sys.stdout.flush()


def job_document(job: "JobRecord") -> dict[str, Any]:
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


def _print_job(job: "JobRecord", as_json: bool, text: str) -> Status:
    if as_json:
        write_document(job_document(job))
    else:
        print_line(f"job {job.id}: {text}")
    return Status.OK


def _state_and_next(job: "JobRecord") -> str:
    from autotune.text.rows import state_text

    following = {
        JobState.QUEUED: "waits for a worker",
        JobState.PAUSING: "its running trials end first",
        JobState.STOPPING: "its running trials end first",
        JobState.CANCELLING: "its running trials are killed",
    }
    return f"{state_text(job)}{f', {following[job.state]}' if job.state in following else ''}"


def _state(name: str) -> JobState:
    try:
        return JobState(name.upper())
    except ValueError:
        states = ", ".join(state.value.lower() for state in JobState)
        raise RequestError("state", f"{name!r} is not a state of a job", f"use some of {states}") from None
