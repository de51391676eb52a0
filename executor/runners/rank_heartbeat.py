"""A rank's heartbeat: its position, sent twice a second by a separate thread, even while a collective waits."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from executor.runners.messages import Kind, Message
from search_spaces.plain import to_plain
from search_spaces.trial import Progress

BEAT_SECONDS = 0.5
PROGRESS_SECONDS = 0.25
"""Least seconds between two progress reports: more frequent ones would be unreadable."""
BUILD = "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """The position of a rank in its trial, by its own clock."""

    phase: str
    step: int
    since: float
    """Seconds since the rank reached this position."""
    longest: float
    """Seconds of the longest step in this trial so far; 0: no step has finished."""


class RankHeartbeat:
    """Sends the position of one rank's trial. `report` is the trial's progress callback, on every rank."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._working = threading.Event()
        self._attempt = ""
        self._reports = False
        self._phase, self._step, self._longest = BUILD, 0, 0.0
        self._came = self._reported = 0.0
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def begin(self, attempt: str, reports: bool) -> None:
        """Start a trial. `reports`: forward this rank's progress to the parent."""
        with self._lock:
            self._attempt, self._reports = attempt, reports
            self._phase, self._step, self._longest = BUILD, 0, 0.0
            self._came, self._reported = time.monotonic(), 0.0
        self._working.set()

    def end(self) -> None:
        """End the trial. A beat that is being sent may still arrive."""
        self._working.clear()

    def report(self, progress: Progress) -> None:
        """Record that the trial has reached this phase and step."""
        now = time.monotonic()
        entered = self._note(progress.phase, progress.step, now)
        if self._reports and (entered or progress.message or now - self._reported >= PROGRESS_SECONDS):
            self._reported = now
            self._send({"kind": Kind.PROGRESS, "progress": to_plain(progress)})

    def _note(self, phase: str, step: int, now: float) -> bool:
        """Update the position. Return whether the phase is new."""
        with self._lock:
            entered = phase != self._phase
            if step > self._step:  # the step count continues from phase to phase
                self._longest = max(self._longest, (now - self._came) / (step - self._step))
            if entered or step != self._step:
                self._phase, self._step, self._came = phase, step, now
        return entered

    def _beat_message(self) -> Message:
        with self._lock:
            since = time.monotonic() - self._came
            position = RankPosition(phase=self._phase, step=self._step, since=since, longest=self._longest)
            return {"kind": Kind.BEAT, "attempt": self._attempt, "standing": to_plain(position)}

    def _beat(self) -> None:
        while True:
            self._working.wait()
            try:
                self._send(self._beat_message())
            except OSError:  # the parent has ended, so this process is about to end
                return
            time.sleep(BEAT_SECONDS)
