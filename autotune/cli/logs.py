"""`autotune logs`: print the output of a trial's ranks."""

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
    """Parsed options of the command."""

    job: str
    trial: int
    attempt: int | None
    """None: all attempts in order."""
    rank: int | None
    """None: all ranks."""
    tail: int | None
    """Last lines of the existing output; None: all."""
    follow: bool
    url: str | None
    database: str | None


def logs_command(options: LogsOptions) -> Status:
    """Print the existing output and, with `follow`, further output until the trial ends."""
    with open_backend(options.url, options.database) as backend:
        try:
            return _print(backend, options)
        except BrokenPipeError:
            # The reader, such as `head`, has closed the pipe. Flushing the buffer at exit must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Status.OK


def _print(backend: JobBackend, options: LogsOptions) -> Status:
    job = backend.job(options.job)
    trial = _trial(backend, job.id, options.trial)
    if options.attempt is not None and options.attempt > trial.attempts and not options.follow:
        remedy = f"give 1 to {trial.attempts}" if trial.attempts else "it was never started"
        raise RequestError("attempt", f"trial {trial.number} has {trial.attempts} so far", remedy)
    of = (options.attempt, options.rank)
    text, gaps = LogText(with_ranks=options.rank is None and has_several_ranks(job.request)), options.rank is None
    lines: deque[str] = deque(maxlen=options.tail)
    last = 0
    for part in backend.logs(job.id, trial.number, *of):
        lines += text.lines([part], gaps)
        last = part.sequence
    if not options.follow:
        lines += text.rest()
    _write(lines)
    if options.follow:
        for part in backend.follow_logs(job.id, trial.number, last, *of):
            _write(text.lines([part], gaps))
            last = part.sequence
        _write(text.rest())
    return _print_status(backend, options, printed=last > 0)


def _print_status(backend: JobBackend, options: LogsOptions, printed: bool) -> Status:
    """Print remarks about the output to standard error, and return the status."""
    job = backend.job(options.job)
    trial = _trial(backend, job.id, options.trial)
    if not printed:
        why = f": {trial.result.message}" if trial.result is not None and trial.result.message else ""
        _print_line(f"no output of trial {trial.number} is stored{why}")
    if options.follow and trial.outcome is None:
        _print_line(f"job {job.id}: {state_text(job)}, and trial {trial.number} has no outcome")
        return Status.FAILURE
    return Status.OK


def _trial(backend: JobBackend, job_id: str, number: int) -> TrialRecord:
    """The trial.

    Raises:
        UnknownTrialError: there is no trial with this number.
    """
    trial = next(backend.trials(job_id, number), None)
    if trial is None or trial.number != number:
        raise UnknownTrialError(f"job {job_id} has no trial {number}; `autotune show {job_id}` lists the existing ones")
    return trial


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(visible(line) + "\n")
    sys.stdout.flush()


def _print_line(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
