"""The thread in which a tracker writes, so that the sweep never waits for it."""

import contextlib
import logging
import queue
import threading
import time

from autotune.outcome.job_snapshot import JobSnapshot
from autotune.session.session import Session
from autotune.trackers.records import job_summary, tracked_job, tracked_trial
from autotune.trackers.registry import open_tracker
from storage.records import TrialRecord

MOST_WAITING = 1_000
"""Trials that may wait for a slow tracker; it is left out when there are more."""
SILENT_SECONDS = 30.0
"""At the end of a job, how long a tracker may take for one write before it is left out."""
CLOSE_SECONDS = 120.0
"""And how long it may take for all of them."""

log = logging.getLogger(__name__)


class TrackerWriter:
    """Writes a job to one tracker, in a thread of its own.

    1. The thread makes the tracker, asks it which trials it has, and writes the others that ended before this process.
    2. It writes the trials that `add` receives, and the summary that `end` receives, in order.
    3. An exception or a tracker that is too slow ends the thread's work. The user gets one warning, and no further one.
    """

    def __init__(self, name: str, session: Session, snapshot: JobSnapshot) -> None:
        """
        Args:
            name: the tracker.
            session: of the job.
            snapshot: the job as it begins in this process.
        """
        self._name, self._session, self._snapshot = name, session, snapshot
        self._waiting: queue.Queue[TrialRecord | JobSnapshot | None] = queue.Queue(MOST_WAITING)
        self._left_out = threading.Event()
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def add(self, trial: TrialRecord) -> None:
        """Write a trial that has its outcome. Returns at once."""
        self._put(trial)

    def end(self, snapshot: JobSnapshot) -> None:
        """Write the summary. Returns at once."""
        self._put(snapshot)

    def close(self) -> None:
        """Wait until everything is written, but no longer than the limits of this module."""
        self._put(None)
        began = self._moved = time.monotonic()
        while self._thread.is_alive() and not self._left_out.is_set():
            self._thread.join(0.05)
            now = time.monotonic()
            if now - self._moved > SILENT_SECONDS or now - began > CLOSE_SECONDS:
                self._leave_out("it does not answer")

    def _put(self, item: TrialRecord | JobSnapshot | None) -> None:
        if self._left_out.is_set():
            return
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self._leave_out(f"{MOST_WAITING:,} trials wait for it")

    def _leave_out(self, reason: str, error: BaseException | None = None) -> None:
        if not self._left_out.is_set():
            self._left_out.set()
            log.warning("tracker %s: %s; it is left out, and the sweep is not affected", self._name, reason)
            log.debug("tracker %s", self._name, exc_info=error)

    def _run(self) -> None:
        try:
            tracker = open_tracker(self._name, tracked_job(self._session, self._snapshot.job))
            with contextlib.closing(tracker):
                written = set(tracker.recorded_trials())
                before = [trial for trial in self._snapshot.trials if trial.outcome is not None]
                waiting: TrialRecord | JobSnapshot | None
                for trial in before:
                    if trial.number not in written and not self._left_out.is_set():
                        tracker.log_trial(tracked_trial(self._snapshot.whole(trial)))
                        written.add(trial.number)
                        self._moved = time.monotonic()
                while not self._left_out.is_set() and (waiting := self._waiting.get()) is not None:
                    if isinstance(waiting, JobSnapshot):
                        tracker.log_summary(job_summary(waiting))
                    elif waiting.number not in written:
                        tracker.log_trial(tracked_trial(waiting))
                        written.add(waiting.number)
                    self._moved = time.monotonic()
        except Exception as error:
            self._leave_out(_line(error), error)


def _line(error: Exception) -> str:
    """The error in one line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]}"
