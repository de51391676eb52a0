"""`autotune watch` and `autotune logs`: follow a job's events until it ends, and the output of a trial's ranks."""

import itertools
import os
import shlex
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from rich.status import Status as StatusLine

from autotune.cli.backend import JobBackend
from autotune.cli.open_backend import open_backend
from autotune.cli.status import Status
from autotune.errors import NoBestError, RequestError
from autotune.text.console import Console
from autotune.text.result import print_result
from autotune.text.rows import TrialRows, place_text, progress_text, rate_text, state_text, state_word
from autotune.text.visible_text import LogText, has_several_ranks, visible
from search_spaces.outcome import JobState, StopReason
from search_spaces.shared_records import JobEvent
from search_spaces.trial import Interval
from storage.errors import UnknownTrialError
from storage.records import AttemptState, EventKind, JobRecord, TrialRecord


def watch_job(backend: JobBackend, job: JobRecord) -> Status:
    """Print the job's events until it has ended, then its result. Ctrl-C detaches and prints how to watch again."""
    console = Console(stderr=True)
    watch = JobWatch(backend, job, console)
    try:
        with console.status("") as line:
            watch.follow(line)
        ended = backend.job(job.id)
        best = _best(backend, job.id)
    except KeyboardInterrupt:
        again = shlex.join(["autotune", "watch", job.id, *backend.words])
        console.print(f"detached; job {job.id} continues; watch it again with:\n  {again}", soft_wrap=True)
        return Status.INTERRUPTED
    print_result(best, Console())
    if ended.reason == StopReason.NOTHING_FEASIBLE:
        return Status.NOTHING_FEASIBLE
    return Status.OK if ended.state is JobState.SUCCEEDED else Status.FAILURE


class JobWatch:
    """State of a followed job."""

    def __init__(self, backend: JobBackend, job: JobRecord, console: Console) -> None:
        self._backend, self._job, self._console = backend, job, console
        self._budget = job.request.get("trials")
        self._read: dict[int, TrialRecord] = {}
        """Trials that were read before their events arrived."""
        self._rows = TrialRows(None)
        self._spent = 0
        self._answer: Mapping[str, Any] | None = job.answer
        self._running: dict[int, str] = {}
        """Running trial -> last progress text; empty: none yet."""

    def follow(self, line: StatusLine) -> None:
        """Print relevant events, and update the status line of a terminal."""
        request = self._job.request
        budget = f"{self._budget} trials by {request.get('strategy', '')}"
        self._console.print(f"job {self._job.id}: {place_text(self._job)}, {budget}, {state_text(self._job)}", soft_wrap=True)
        for update in self._backend.live(self._job.id):
            if isinstance(update, JobEvent):
                text = self._event_text(update)
                if text:
                    self._console.print(text, soft_wrap=True)
            elif update.trial in self._running:
                self._running[update.trial] = progress_text(update)
            line.update(self._summary())

    def _event_text(self, event: JobEvent) -> str:
        payload = event.payload
        match event.kind:
            case EventKind.ATTEMPT_STARTED:
                self._running[payload["trial"]] = ""
            case EventKind.ATTEMPT_ABANDONED:
                self._running.pop(payload["trial"], None)
            case EventKind.TRIAL_REFUSED:
                return self._ended(payload["trial"])
            case EventKind.ATTEMPT_FINISHED:
                self._running.pop(payload["trial"], None)
                if payload["state"] == AttemptState.ACCEPTED:
                    return self._ended(payload["trial"])
                if payload["state"] == AttemptState.RETRIED:
                    return f"trial {payload['trial']}: {payload['outcome']}, retried  {payload.get('message', '')}".rstrip()
            case EventKind.JOB_ACQUIRED:
                return "running" if payload.get("taken_from") is None else "running: taken over by another worker"
            case EventKind.JOB_ASKED:
                return str(payload["state"]).lower()
            case EventKind.JOB_RELEASED:
                message = f": {payload['message']}" if payload.get("message") else ""
                return f"{state_word(payload['state'], payload.get('reason', ''))}{message}"
            case EventKind.JOB_CHANGED:
                self._budget = payload.get("trials", self._budget)
                return "changed: " + " ".join(f"{name}={value}" for name, value in payload.items())
        return ""

    def _ended(self, number: int) -> str:
        trial = self._trial(number)
        self._spent += trial.counted
        return self._rows.line(trial) + self._news()

    def _news(self) -> str:
        """Text about a new answer; empty if it is unchanged."""
        answer = self._backend.job(self._job.id).answer
        changed = answer is not None and answer["trial"] != (self._answer or {}).get("trial")
        self._answer = answer
        if answer is None or not changed:
            return ""
        return f"  ★ best so far: trial {answer['trial']}{', the baseline' if answer['keeps_baseline'] else ''}"

    def _trial(self, number: int) -> TrialRecord:
        """The finished trial. Later trials are read at the same time, and cached if they are finished."""
        if number not in self._read:
            # Many may have ended already.
            page = itertools.islice(self._backend.trials(self._job.id, number), 100)
            self._read |= {trial.number: trial for trial in page if trial.outcome is not None}
        return self._read.pop(number)

    def _summary(self) -> str:
        parts = [f"{self._spent} of {self._budget} trials"]
        if self._answer is not None:
            rate = self._answer["rate"]
            interval = Interval(mean=rate["mean"], low=rate["low"], high=rate["high"])
            parts.append(f"best {rate_text(interval)} samples/s (trial {self._answer['trial']})")
        parts += [f"trial {number}: {state or 'runs'}" for number, state in sorted(self._running.items())[:4]]
        return ", ".join(parts).replace("[", "\\[")


def _best(backend: JobBackend, job_id: str) -> dict[str, object] | None:
    try:
        return backend.best(job_id)
    except NoBestError:
        return None


def logs_command(
    job_id: str,
    number: int,
    *,
    attempt: int | None,
    rank: int | None,
    tail: int | None,
    follow: bool,
    url: str | None,
    database: str | None,
) -> Status:
    """Print the existing output of a trial and, with `follow`, further output until the trial ends.

    `attempt`, `rank`: None: all. `tail`: last lines of the existing output; None: all.
    """
    with open_backend(url, database) as backend:
        try:
            job = backend.job(job_id)
            trial = _trial(backend, job.id, number)
            if attempt is not None and attempt > trial.attempts and not follow:
                remedy = f"give 1 to {trial.attempts}" if trial.attempts else "it was never started"
                raise RequestError("attempt", f"trial {trial.number} has {trial.attempts} so far", remedy)
            text, gaps = LogText(with_ranks=rank is None and has_several_ranks(job.request)), rank is None
            lines: deque[str] = deque(maxlen=tail)
            last = 0
            for part in backend.logs(job.id, trial.number, attempt, rank):
                lines += text.lines([part], gaps)
                last = part.sequence
            if not follow:
                lines += text.rest()
            _write(lines)
            if follow:
                for part in backend.follow_logs(job.id, trial.number, last, attempt, rank):
                    _write(text.lines([part], gaps))
                    last = part.sequence
                _write(text.rest())
            return _print_status(backend, job.id, number, follow, printed=last > 0)
        except BrokenPipeError:
            # The reader, such as `head`, has closed the pipe. Flushing the buffer at exit must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Status.OK


def _print_status(backend: JobBackend, job_id: str, number: int, follow: bool, printed: bool) -> Status:
    """Print remarks about the output to standard error, and return the status."""
    job = backend.job(job_id)
    trial = _trial(backend, job.id, number)
    if not printed:
        why = f": {trial.result.message}" if trial.result is not None and trial.result.message else ""
        Console(stderr=True).print(f"no output of trial {trial.number} is stored{why}", soft_wrap=True)
    if follow and trial.outcome is None:
        Console(stderr=True).print(f"job {job.id}: {state_text(job)}, and trial {trial.number} has no outcome", soft_wrap=True)
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
