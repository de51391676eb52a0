"""A rank's signs of life: where it stands, told twice a second by a thread of its own, also while a collective waits."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from executor.runners.messages import Kind, Message
from search_spaces.plain import to_plain
from search_spaces.trial import Progress

BEAT_SECONDS = 0.5
PROGRESS_SECONDS = 0.25
"""Least seconds between two reports of progress: more nobody can read."""
BUILD = "build"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a rank stands in its trial, by its own clock."""

    phase: str
    step: int
    since: float
    """Seconds since it came there."""
    longest: float
    """Seconds of its longest step in this trial so far; 0: it has made none."""


class RankHeartbeat:
    """Follows one rank's trial. `tell` is the trial's callback for progress, on every rank."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._working = threading.Event()
        self._attempt = ""
        self._reports = False
        self._phase, self._step, self._longest = BUILD, 0, 0.0
        self._came = self._reported = 0.0
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def begin(self, attempt: str, reports: bool) -> None:
        """A trial begins. `reports`: this rank's progress goes to the parent."""
        with self._lock:
            self._attempt, self._reports = attempt, reports
            self._phase, self._step, self._longest = BUILD, 0, 0.0
            self._came, self._reported = time.monotonic(), 0.0
        self._working.set()

    def end(self) -> None:
        """It is over. A beat that is being sent may still come."""
        self._working.clear()

    def tell(self, progress: Progress) -> None:
        """The trial has come to this phase and step."""
        now = time.monotonic()
        entered = self._note(progress.phase, progress.step, now)
        if self._reports and (entered or progress.message or now - self._reported >= PROGRESS_SECONDS):
            self._reported = now
            self._send({"kind": Kind.PROGRESS, "progress": to_plain(progress)})

    def _note(self, phase: str, step: int, now: float) -> bool:
        """Whether the phase is a new one."""
        with self._lock:
            entered = phase != self._phase
            if step > self._step:  # steps are counted on from phase to phase
                self._longest = max(self._longest, (now - self._came) / (step - self._step))
            if entered or step != self._step:
                self._phase, self._step, self._came = phase, step, now
        return entered

    def _standing(self) -> Message:
        with self._lock:
            standing = Standing(phase=self._phase, step=self._step, since=time.monotonic() - self._came, longest=self._longest)
            return {"kind": Kind.BEAT, "attempt": self._attempt, "standing": to_plain(standing)}

    def _beat(self) -> None:
        while True:
            self._working.wait()
            try:
                self._send(self._standing())
            except OSError:  # the parent is gone, and so will this process be
                return
            time.sleep(BEAT_SECONDS)
