"""How a caller follows a running job and stops it: notifications for a live table, a log, a page, and the request to stop."""

import threading
from types import TracebackType

from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import JobVerdict
from autotune.session.session import Session
from autotune.trackers.writer import TrackerWriter
from search_spaces.outcome import JobState
from search_spaces.trial import Progress
from storage.records import HELD, TrialRecord


class LoopListener:
    """Callbacks of the loop, called from its thread; override those of interest. An exception from a method ends the run."""

    def on_state(self, state: JobState, message: str, snapshot: JobSnapshot) -> None:
        """The job began, is being stopped, or has ended."""

    def on_note(self, note: str) -> None:
        """A note for the user on how the job decides, before its first trial."""

    def on_news(self, news: str) -> None:
        """One line about an event on the job's machines."""

    def on_start(self, trial: TrialRecord) -> None:
        """An attempt at the trial was submitted to the runner."""

    def on_progress(self, trial: TrialRecord, progress: Progress) -> None:
        """A running trial reported its progress."""

    def on_answer(self, verdict: JobVerdict | None) -> None:
        """The job's verdict so far changed; None: no configuration can win any more."""

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        """A trial has its outcome. Refused candidates have one without running."""


class TrackedListener(LoopListener):
    """Forwards every notification to a listener, and gives trials and the end of the job to the request's trackers.

    As a context manager, it waits on exit until the trackers have written, within the limits of `autotune.trackers.writer`.
    """

    def __init__(self, listener: LoopListener, session: Session) -> None:
        self._listener, self._session = listener, session
        self._writers: list[TrackerWriter] = []
        for name in (name for name in vars(LoopListener) if name.startswith("on_") and name not in vars(TrackedListener)):
            setattr(self, name, getattr(listener, name))

    def __enter__(self) -> "TrackedListener":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for writer in self._writers:
            writer.close()

    def on_state(self, state: JobState, message: str, snapshot: JobSnapshot) -> None:
        self._listener.on_state(state, message, snapshot)
        if not self._writers:
            self._writers = [TrackerWriter(name, self._session, snapshot) for name in self._session.request.trackers]
        if state not in HELD:
            for writer in self._writers:
                writer.end(snapshot)

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        self._listener.on_trial(trial, snapshot)
        for writer in self._writers:
            writer.add(trial)


class StopSignal:
    """Set by a signal handler or another thread, polled by the loop. The first request lets running trials end."""

    def __init__(self, worker: "StopSignal | None" = None) -> None:
        """`worker`: the signal of the worker that runs the job. Its requests also apply to the job, which then goes back to the
        queue instead of being paused.
        """
        self._worker = worker
        self._stop = threading.Event()
        self._kill = threading.Event()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for a stop request; return whether there is one."""
        return self._stop.wait(seconds)

    def request(self) -> None:
        """Request a stop. The first call starts no further trials; the second kills the running ones."""
        (self._kill if self._stop.is_set() else self._stop).set()

    @property
    def requested(self) -> bool:
        """Whether no further trial is to be started."""
        return self._stop.is_set() or (self._worker is not None and self._worker.requested)

    @property
    def kill_requested(self) -> bool:
        """Whether running trials are to be killed."""
        return self._kill.is_set() or (self._worker is not None and self._worker.kill_requested)

    @property
    def hands_back(self) -> bool:
        """Whether a stopped job goes back to the queue for the next worker."""
        return self._worker is not None
