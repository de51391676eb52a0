"""Notifications of a running job: for a live table, a log, a page."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import Verdict
from autotune.session.session import Session
from search_spaces.outcome import JobState
from search_spaces.plugins import Group, load_plugins
from search_spaces.trial import Progress
from storage.records import TrialRecord

log = logging.getLogger(__name__)


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

    def on_answer(self, verdict: Verdict | None) -> None:
        """The job's verdict so far changed; None: no configuration can win any more."""

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        """A trial has its outcome. Refused candidates have one without running."""


class TrackedListener(LoopListener):
    """Forwards every notification to a listener and to the trackers of plug-ins.

    A tracker that raises is removed with a warning: its errors must not end the job.
    """

    def __init__(self, listener: LoopListener, trackers: dict[str, LoopListener]) -> None:
        self._listener, self._trackers = listener, trackers
        for name in (name for name in vars(LoopListener) if name.startswith("on_")):
            setattr(self, name, functools.partial(self._notify, name))

    def _notify(self, method: str, *arguments: Any) -> None:
        notify: Callable[..., None] = getattr(self._listener, method)
        notify(*arguments)
        for name, tracker in list(self._trackers.items()):
            try:
                getattr(tracker, method)(*arguments)
            except Exception:
                log.warning("tracker %s: %s failed; it is left out", name, method, exc_info=True)
                del self._trackers[name]


def with_trackers(listener: LoopListener | None, session: Session) -> LoopListener:
    """Combine the listener with the installed trackers. Raises what `load_plugins` raises."""
    trackers = {name: track(session) for name, track in load_plugins(Group.TRACKERS).items()}
    own = listener or LoopListener()
    return TrackedListener(own, trackers) if trackers else own
