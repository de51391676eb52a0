"""Detects hangs: a rank's heartbeat, and the watchdog that decides whether the ranks hang or are only slow."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from executor.runners.messages import Message, MessageKind
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.models.command import CommandModel
from search_spaces.plain import to_plain
from search_spaces.trial import Progress, TrialRequest

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
            self._send({"kind": MessageKind.PROGRESS, "progress": to_plain(progress)})

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
            return {"kind": MessageKind.BEAT, "attempt": self._attempt, "standing": to_plain(position)}

    def _beat(self) -> None:
        while True:
            self._working.wait()
            try:
                self._send(self._beat_message())
            except OSError:  # the parent has ended, so this process is about to end
                return
            time.sleep(BEAT_SECONDS)


SLOW_FACTOR = 20.0
"""Multiple of the predicted step time, or of the longest step so far, above which a step counts as hanging. A prediction may be
ten times too short, another process may take half of the machine, and the memory account makes a step several times longer."""
HANG_SECONDS = 30.0
"""Least time before a step counts as hanging: a short step may wait for a disk, swap or garbage collection."""
FIRST_STEP_SECONDS = 120.0
"""Additional time for the first step: it loads kernels, connects and allocates, which no prediction includes and which does not
grow with the step. It is added, because a step may both be slow and connect slowly."""
COMPILE_SECONDS = 600.0
"""Further additional time for the first step with torch.compile."""
MOST_RANKS = 8
"""Most ranks that a message names."""


class Watchdog:
    """Receives the beats of one trial's ranks. `now` is the gang's clock, in seconds."""

    def __init__(self, request: TrialRequest | MicrobenchmarkRequest) -> None:
        # A user's script may save or evaluate between two reports, so `engines.command` monitors its activity instead.
        steps = isinstance(request, TrialRequest) and not isinstance(request.model, CommandModel)
        self._expected = request.expected_step_seconds if isinstance(request, TrialRequest) else None
        self._watches = steps
        compiles = isinstance(request, TrialRequest) and request.config.compile_blocks
        self._first = FIRST_STEP_SECONDS + (COMPILE_SECONDS if compiles else 0.0)
        self._world_size = request.world_size
        self._positions: dict[int, RankPosition] = {}
        self._heard: dict[int, float] = {}

    def record(self, rank: int, position: RankPosition, now: float) -> None:
        """Record a rank's beat."""
        self._positions[rank], self._heard[rank] = position, now

    def hang(self, now: float) -> str:
        """Return why the trial hangs; empty: it does not.

        1. Every rank has sent a beat, and all are in a phase of steps. The time of the build is not predicted.
        2. No rank has made progress for `SLOW_FACTOR` times the predicted step, or the longest step so far if that is longer: a
           prediction that is too short does not end a trial that has finished a step.
        3. Until every rank has finished a step, `FIRST_STEP_SECONDS` are added, and `COMPILE_SECONDS` if the trial compiles.
           Afterwards at least `HANG_SECONDS` must pass.
        4. Without a step and without a prediction there is no reference: only the trial's own limit applies.
        """
        ranks = self._positions.values()
        stepping = {rank.phase for rank in ranks} <= {"warmup", "memory", "measure"}
        if not self._watches or len(ranks) < self._world_size or not stepping:
            return ""
        slowest = min(rank.longest for rank in ranks)
        reference = max(self._expected or 0.0, max(rank.longest for rank in ranks))
        if not reference:
            return ""
        most = max(SLOW_FACTOR * reference, HANG_SECONDS) if slowest else self._first + SLOW_FACTOR * reference
        if (still := self._since(list(self._positions), now)) <= most:
            return ""
        verb = "is predicted to take" if reference == self._expected else "took"
        return f"no rank has made progress for {still:.0f} s, and a step {verb} {reference:.2g} s"

    def places(self, now: float) -> str:
        """Describe the positions of the ranks, grouping ranks at the same position."""
        groups: dict[tuple[str, int], list[int]] = {}
        for rank in sorted(self._positions):
            position = self._positions[rank]
            groups.setdefault((position.phase, position.step), []).append(rank)
        parts = [
            f"{_named(ranks)} in {phase}, step {step}, for {self._since(ranks, now):.0f} s"
            for (phase, step), ranks in groups.items()
        ]
        silent = [rank for rank in range(self._world_size) if rank not in self._positions]
        if silent:
            parts.append("nothing was heard of it" if self._world_size == 1 else f"nothing was heard of {_named(silent)}")
        return "; ".join(parts)

    def behind(self) -> list[int]:
        """Return the ranks, those with the least progress first."""
        return sorted(self._positions, key=lambda rank: (self._positions[rank].step, -self._positions[rank].since))

    def _since(self, ranks: list[int], now: float) -> float:
        """Return the seconds since the last progress of any of these ranks. A silent rank counts as still at its position."""
        return min(self._positions[rank].since + now - self._heard[rank] for rank in ranks)


def stacks_text(stacks: Mapping[int, str], order: list[int], most: int) -> str | None:
    """Join the stacks that ranks printed, for the first `most` ranks in this order; None: no rank printed any."""
    shown = [rank for rank in [*order, *sorted(set(stacks) - set(order))] if rank in stacks][:most]
    return "\n".join(f"rank {rank}:\n{stacks[rank]}" for rank in shown) or None


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_RANKS])) + (
        f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
