"""`autotune logs`: what the ranks of a trial printed."""

import os
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from autotune.cli.backend import JobBackend
from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.ops.trial_log import LogText, has_several_ranks
from autotune.text.console import Console
from autotune.text.jobs import state_text
from autotune.text.visible_text import visible
from storage.errors import UnknownTrialError
from storage.records import TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsOptions:
    """What the command line gave."""

    job: str
    trial: int
    attempt: int | None
    """None: all attempts, one after the other."""
    rank: int | None
    """None: all ranks."""
    tail: int | None
    """Lines of what there is already; None: all."""
    follow: bool
    url: str | None
    database: str | None


def logs_command(options: LogsOptions) -> Status:
    """Print what there is and, with `follow`, what comes until the trial ends."""
    with open_backend(options.url, options.database) as desk:
        try:
            return _print(desk, options)
        except BrokenPipeError:
            # Whoever read it, such as `head`, has enough. What is left in the buffer must not fail at the end once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Status.OK


def _print(desk: JobBackend, options: LogsOptions) -> Status:
    job = desk.job(options.job)
    trial = _trial(desk, job.id, options.trial)
    if options.attempt is not None and options.attempt > trial.attempts and not options.follow:
        remedy = f"give 1 to {trial.attempts}" if trial.attempts else "it was never started"
        raise RequestError("attempt", f"trial {trial.number} has {trial.attempts} so far", remedy)
    of = (options.attempt, options.rank)
    text, gaps = LogText(named=options.rank is None and has_several_ranks(job.request)), options.rank is None
    lines: deque[str] = deque(maxlen=options.tail)
    last = 0
    for part in desk.logs(job.id, trial.number, *of):
        lines += text.lines([part], gaps)
        last = part.sequence
    if not options.follow:
        lines += text.rest()
    _write(lines)
    if options.follow:
        for part in desk.follow_logs(job.id, trial.number, last, *of):
            _write(text.lines([part], gaps))
            last = part.sequence
        _write(text.rest())
    return _told(desk, options, printed=last > 0)


def _told(desk: JobBackend, options: LogsOptions, printed: bool) -> Status:
    """What the output itself does not say, on standard error."""
    job = desk.job(options.job)
    trial = _trial(desk, job.id, options.trial)
    if not printed:
        why = f": {trial.result.message}" if trial.result is not None and trial.result.message else ""
        _say(f"nothing is kept of what trial {trial.number} printed{why}")
    if options.follow and trial.outcome is None:
        _say(f"job {job.id}: {state_text(job)}, and trial {trial.number} has no outcome")
        return Status.FAILURE
    return Status.OK


def _trial(desk: JobBackend, job_id: str, number: int) -> TrialRecord:
    """The trial.

    Raises:
        UnknownTrialError: there is none of this number.
    """
    trial = next(desk.trials(job_id, number), None)
    if trial is None or trial.number != number:
        raise UnknownTrialError(f"job {job_id} has no trial {number}; `autotune show {job_id}` lists those that there are")
    return trial


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(visible(line) + "\n")
    sys.stdout.flush()


def _say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
