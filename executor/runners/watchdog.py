"""Watches rank processes: detects hangs during a trial, and whether warm processes return to their base usage after it."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from executor.process_tree import descendants
from executor.runners.transport import Message, MessageKind
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.models.command import CommandModel
from search_spaces.plain import to_plain
from search_spaces.trial import Progress, TrialRequest


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

    _BUILD = "build"

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._working = threading.Event()
        self._attempt = ""
        self._reports = False
        self._phase, self._step, self._longest = self._BUILD, 0, 0.0
        # When progress last came (monotonic seconds), and was last reported to the parent.
        self._came = self._reported = 0.0
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def begin(self, attempt: str, reports: bool) -> None:
        """Start a trial. `reports`: forward this rank's progress to the parent."""
        with self._lock:
            self._attempt, self._reports = attempt, reports
            self._phase, self._step, self._longest = self._BUILD, 0, 0.0
            self._came, self._reported = time.monotonic(), 0.0
        self._working.set()

    def end(self) -> None:
        """End the trial. A beat that is being sent may still arrive."""
        self._working.clear()

    def report(self, progress: Progress) -> None:
        """Record that the trial has reached this phase and step."""
        now = time.monotonic()
        entered = self._note(progress.phase, progress.step, now)
        # More than one report in 0.25 s would be unreadable.
        if self._reports and (entered or progress.message or now - self._reported >= 0.25):
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
            time.sleep(0.5)


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
    # Most ranks that a message names.
    most_ranks = 8
    shown = ", ".join(map(str, ranks[:most_ranks])) + (
        f" and {len(ranks) - most_ranks} more" if len(ranks) > most_ranks else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


TRIALS_PER_PROCESS = 100
"""Trials after which processes are restarted whatever they hold. This bounds leaks that are too slow or not checked. A cold
start takes a few seconds, which is well below a tenth of a second per trial."""
RESIDENT_BYTES = 512 * 2**20
"""Memory of each kind may grow by half of the base plus these bytes: allocators and libraries cache part of what the
largest trial needed, and the next large one reuses it. A leak exceeds any bound."""
DESCRIPTORS = 64
"""Allowed open files beyond the base: sockets of a large gang come and go, leaked ones accumulate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """What a rank process holds between two trials."""

    resident_bytes: int
    descriptors: int
    """Open files."""
    children: int
    """Its living descendants."""
    reserved_bytes: int = 0
    """Device memory reserved by torch's allocator after its cache has been released."""
    pinned_bytes: int = 0
    """Host memory held by torch's pinned allocator after its cache has been released. Not part of the resident set."""
    failed: bool = False
    """Whether the trial failed on this rank."""


def process_usage(reserved_bytes: int = 0, pinned_bytes: int = 0, failed: bool = False) -> ProcessUsage | None:
    """Return the usage of this process after a trial; None: the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  only names are needed
    except OSError:
        return None
    return ProcessUsage(
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        descriptors=descriptors,
        children=len(descendants(os.getpid())),
        reserved_bytes=reserved_bytes,
        pinned_bytes=pinned_bytes,
        failed=failed,
    )


class Wear:
    """Tracks what each rank of a gang holds after its trials, since the processes were started."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._base: dict[int, ProcessUsage] = {}
        self._last: dict[int, ProcessUsage] = {}

    def clear(self) -> None:
        """Start anew, for new processes."""
        self._seen.clear()
        self._base.clear()
        self._last.clear()

    def record(self, rank: int, usage: ProcessUsage) -> None:
        """Record what a rank holds after a trial."""
        self._seen[rank] = self._seen.get(rank, 0) + 1
        self._last[rank] = usage
        # The usage after the second trial is the base: it includes late imports, libraries' caches and process groups of the
        # first. A failed trial may leave its allocations: if it is one of these two, the base includes none of torch's memory.
        if self._seen[rank] <= 2:
            self._base[rank] = replace(usage, reserved_bytes=0, pinned_bytes=0) if usage.failed else usage

    def restart_reason(self) -> str:
        """Return why the processes should be restarted; empty: they can continue."""
        return next(filter(None, (_grown(rank, self._base[rank], now) for rank, now in self._last.items())), "")


def _grown(rank: int, base: ProcessUsage, now: ProcessUsage) -> str:
    for kind, before, after in (
        ("resident", base.resident_bytes, now.resident_bytes),
        ("device", base.reserved_bytes, now.reserved_bytes),
        ("pinned", base.pinned_bytes, now.pinned_bytes),
    ):
        if after > 1.5 * before + RESIDENT_BYTES:
            return f"rank {rank} holds {after:,} bytes of {kind} memory between trials, {before:,} after its second"
    if now.descriptors > base.descriptors + DESCRIPTORS:
        return f"rank {rank} has {now.descriptors} open files between trials, {base.descriptors} after its second"
    if now.children > base.children:
        return f"rank {rank} has {now.children} processes of its own between trials, {base.children} after its second"
    return ""
