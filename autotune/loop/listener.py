"""Notifications of a running job: for a live table, a log, a page."""

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
