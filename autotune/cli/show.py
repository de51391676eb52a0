"""`autotune show`: show a job."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.cli.documents import write_document
from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.errors import NoBestError, RequestError
from autotune.objective.ranking import peak_bytes, rate
from autotune.request.request import Objective
from autotune.text.console import Console
from autotune.text.jobs import labels_text, place_text, progress_text, state_text
from autotune.text.result import print_result
from autotune.text.rows import TrialTable, baseline_of
from autotune.text.sizes import duration_text
from executor.failures import failure_table
from search_spaces.failure import FailureRow
from search_spaces.outcome import Outcome, Purpose
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial_config import KNOB_NAMES
from storage.records import JobRecord, TrialRecord

SORTS: Mapping[str, Callable[[TrialRecord], float | None]] = {
    "number": lambda trial: trial.number,
    "samples_per_second": lambda trial: -rate(trial) if trial.outcome is Outcome.OK else None,
    "peak_memory_bytes": lambda trial: peak_bytes(trial) if trial.outcome is Outcome.OK else None,
    "seconds": lambda trial: (trial.finished - trial.started).total_seconds() if trial.started and trial.finished else None,
}
"""Sort keys of trials in addition to knobs, ascending; None comes last. Rates are negated, so that the highest comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowOptions:
    """Parsed options of the command."""

    job: str | None
    top: int | None
    """Maximum number of trials; None: all."""
    sort: str | None
    """One of SORTS or a knob; None: by number, or with `top` only search trials by the job's objective."""
    url: str | None
    database: str | None
    json: bool


def show_command(options: ShowOptions) -> Status:
    """Print state, trials and best configuration of one job."""
    if options.sort is not None and options.sort not in (*SORTS, *KNOB_NAMES):
        raise RequestError("sort", f"{options.sort!r} is not a field", f"use {', '.join(SORTS)}, or the name of a knob")
    with open_backend(options.url, options.database) as backend:
        job = backend.job(options.job)
        trials = list(backend.trials(job.id))
        running = {progress.trial: progress_text(progress) for progress in backend.progress(job.id)}
        try:
            best = backend.best(job.id)
        except NoBestError:
            best = None
    chosen = _chosen(job, trials, options)
    if options.json:
        write_document(_document(job, chosen, best))
        return Status.OK
    console = Console()
    counted = sum(trial.counted for trial in trials)
    console.print(
        f"job {job.id}: {state_text(job)}, {place_text(job)}, {counted} trials in {duration_text(job.active_seconds)}, "
        f"opened {job.created:%Y-%m-%d %H:%M} UTC",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if labels := labels_text(job.request):
        console.print(f"  {labels}", highlight=False, markup=False, soft_wrap=True)
    if job.message:
        console.print(f"  {job.message}", highlight=False, markup=False, soft_wrap=True)
    _print_trials(trials, chosen, console, best, running)
    _print_causes(job, chosen, console)
    print_result(best, console)
    return Status.OK


def _chosen(job: JobRecord, trials: list[TrialRecord], options: ShowOptions) -> list[TrialRecord]:
    """The selected trials in order. Sorting is stable: equal ones keep the order of their numbers."""
    field = options.sort
    if field is None and options.top is not None:
        # Without repeats, because the luckiest of many repeats would come first.
        trials = [trial for trial in trials if trial.purpose is Purpose.SEARCH]
        memory = job.request.get("objective") == Objective.MEMORY
        field = "peak_memory_bytes" if memory else "samples_per_second"
    value = SORTS.get(field or "number")
    if value is not None:
        valued = sorted((trial for trial in trials if value(trial) is not None), key=lambda trial: value(trial) or 0.0)
        trials = [*valued, *(trial for trial in trials if value(trial) is None)]
    else:
        trials = sorted(trials, key=lambda trial: getattr(trial.config, str(field)))
    return trials[: options.top]


def _print_trials(
    trials: Sequence[TrialRecord],
    chosen: Sequence[TrialRecord],
    console: Console,
    best: dict[str, Any] | None,
    running: Mapping[int, str],
) -> None:
    number = best["best"]["trial"] if best else None
    rows = TrialTable(baseline_of(trials))
    for trial in chosen:
        rows.add(trial, best=trial.number == number, state=running.get(trial.number, "wanted"))
    console.print(rows.table, highlight=False)
    if len(chosen) < len(trials):
        console.print(f"  {len(chosen)} of {len(trials)} trials", style="dim", highlight=False)
    for trial in chosen:
        if trial.result is not None and trial.result.message:
            line = f"  trial {trial.number}: {trial.result.message}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _print_causes(job: JobRecord, trials: Sequence[TrialRecord], console: Console) -> None:
    """Print the remedy of each cause of failure once."""
    table = failure_table(tuple(from_plain(FailureRow, row) for row in job.request.get("failures", ())))
    causes = dict.fromkeys(trial.result.cause for trial in trials if trial.result is not None)
    for row in filter(None, map(table.row, causes)):
        numbers = [trial.number for trial in trials if trial.result is not None and trial.result.cause == row.name]
        line = f"  {row.name} ({trials_text(numbers)}): {row.remedy}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def trials_text(numbers: Sequence[int]) -> str:
    """`trial 3`, `trials 3, 5`, or the first few of many."""
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"trial{'s' if len(numbers) > 1 else ''} {shown}"


def _document(job: JobRecord, trials: Sequence[TrialRecord], best: dict[str, Any] | None) -> dict[str, Any]:
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
            for trial in trials
        ],
        "best_config": best,
    }  # fmt: skip
