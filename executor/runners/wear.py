"""Checks whether warm rank processes return to their base usage after a trial, or still hold what earlier trials left."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from executor.process_tree import descendants

TRIALS_PER_PROCESS = 100
"""Trials after which processes are restarted whatever they hold. This bounds leaks that are too slow or not checked. A cold
start takes a few seconds, which is well below a tenth of a second per trial."""
RESIDENT_SHARE = 0.5
RESIDENT_BYTES = 512 * 2**20
"""Memory of each kind may grow by this share of the base plus these bytes: allocators and libraries cache part of what the
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
        if after > before * (1 + RESIDENT_SHARE) + RESIDENT_BYTES:
            return f"rank {rank} holds {after:,} bytes of {kind} memory between trials, {before:,} after its second"
    if now.descriptors > base.descriptors + DESCRIPTORS:
        return f"rank {rank} has {now.descriptors} open files between trials, {base.descriptors} after its second"
    if now.children > base.children:
        return f"rank {rank} has {now.children} processes of its own between trials, {base.children} after its second"
    return ""
