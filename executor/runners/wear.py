"""What warm rank processes still hold after a trial: their usage compared with the first, and their device memory."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from executor.measurement.device import DeviceCounters
from executor.process_tree import descendants
from search_spaces.failure import Sign

TRIALS_PER_PROCESS = 100
"""Trials after which processes are restarted whatever they hold. This bounds leaks that are too slow or not checked. A cold
start takes a few seconds, which is well below a tenth of a second per trial."""
BASE_TRIALS = 2
"""The usage after the second trial is the base: it includes late imports, libraries' caches and process groups of the first.
A failed trial may leave its allocations: if it is one of these two, the base includes none of torch's memory."""
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
        if self._seen[rank] <= BASE_TRIALS:
            self._base[rank] = replace(usage, reserved_bytes=0, pinned_bytes=0) if usage.failed else usage

    def restart_reason(self) -> str:
        """Return why the processes should be restarted; empty: they can continue."""
        return next(filter(None, (_grown(rank, self._base[rank], now) for rank, now in self._last.items())), "")


def _grown(rank: int, base: ProcessUsage, now: ProcessUsage) -> str:
    for kind, before, held in (
        ("resident", base.resident_bytes, now.resident_bytes),
        ("device", base.reserved_bytes, now.reserved_bytes),
        ("pinned", base.pinned_bytes, now.pinned_bytes),
    ):
        if held > before * (1 + RESIDENT_SHARE) + RESIDENT_BYTES:
            return f"rank {rank} holds {held:,} bytes of {kind} memory between trials, {before:,} after its second"
    if now.descriptors > base.descriptors + DESCRIPTORS:
        return f"rank {rank} has {now.descriptors} open files between trials, {base.descriptors} after its second"
    if now.children > base.children:
        return f"rank {rank} has {now.children} processes of its own between trials, {base.children} after its second"
    return ""


_WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class DeviceMemory:
    """Tracks one rank process from trial to trial. Without device counters it does nothing: host memory is shared."""

    def __init__(self) -> None:
        self._base: int | None = None
        self._settles = False
        """Whether the base is read again: the first trial has ended well, and left what libraries load once."""
        self._held = 0
        self._counters: DeviceCounters | None = None

    def begin(self, counters: DeviceCounters) -> None:
        """Start a trial. Memory in use beyond that at the start of the second was left by the trials in between; the first one
        also leaves kernels and workspaces of libraries, about 1 GB on an H200. If it failed, its own start is the base."""
        if (known := counters.memory_in_use()) is None:
            return
        used, _ = known
        if self._base is None or self._settles:
            self._base, self._settles = used, self._base is None
        self._counters, self._held = counters, max(used - self._base, 0)

    def failed(self) -> None:
        """The trial failed: what it has left is not the base."""
        self._settles = False

    def signs(self, message: str) -> tuple[Sign, ...]:
        """Return LEFTOVER if an allocation lacked no more memory than earlier trials have left."""
        missed = missing_bytes(message, self._free()) if self._held else None
        return (Sign.LEFTOVER,) if missed is not None and self._held >= missed else ()

    def _free(self) -> int:
        # After a sticky error the device no longer answers, and the message is not the allocator's.
        known = None if self._counters is None else self._counters.memory_in_use()
        return 0 if known is None else known[1]


def missing_bytes(message: str, free: int) -> int | None:
    """Return the bytes that the device lacked, from the message of torch's allocator; None: it is another message."""
    found = _WANTED.search(message)
    return None if found is None else max(int(float(found[1]) * _UNITS[found[2]]) - free, 0)
