"""Whether warm rank processes have come back to their base after a trial, or hold what earlier trials left."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from executor.process_tree import descendants

TRIALS_IN_A_LIFE = 100
"""Trials after which processes are started anew whatever they hold: what grows too slowly to be seen, or where nobody looks,
has an end too. A cold start takes some seconds, so that it costs a trial well below a tenth of one."""
BASE_TRIALS = 2
"""What the second trial leaves is the base: the first one's late imports, libraries' caches and process groups are in it. A
trial that failed may leave what it allocated: where it is one of these, the base holds none of torch's memory."""
RESIDENT_SHARE = 0.5
RESIDENT_BYTES = 512 * 2**20
"""Memory of each kind may grow by this share of the base and these bytes: allocators and libraries keep some of what the
largest trial needed, which the next large one takes again; a leak goes past any bound."""
DESCRIPTORS = 64
"""Open files beyond the base: sockets of a gang of many ranks come and go, leaked ones add up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What a rank process holds between two trials."""

    resident_bytes: int
    descriptors: int
    """Open files."""
    children: int
    """Processes that it has started, with theirs, and that still live."""
    reserved_bytes: int = 0
    """Of the device's memory, by torch's allocator, when its cache has been given back."""
    pinned_bytes: int = 0
    """Of the host's memory, by torch's allocator of pinned memory, when its cache has been given back. Not resident."""
    failed: bool = False
    """Whether the trial failed on this rank."""


def rest(reserved_bytes: int = 0, pinned_bytes: int = 0, failed: bool = False) -> Rest | None:
    """Of this process, after a trial; None: the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names alone
    except OSError:
        return None
    return Rest(
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        descriptors=descriptors,
        children=len(descendants(os.getpid())),
        reserved_bytes=reserved_bytes,
        pinned_bytes=pinned_bytes,
        failed=failed,
    )


class Wear:
    """What each rank of a gang held after each of its trials, since the processes were started."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._base: dict[int, Rest] = {}
        self._last: dict[int, Rest] = {}

    def clear(self) -> None:
        """The processes are new."""
        self._seen.clear()
        self._base.clear()
        self._last.clear()

    def note(self, rank: int, rest: Rest) -> None:
        """What a rank holds after a trial."""
        self._seen[rank] = self._seen.get(rank, 0) + 1
        self._last[rank] = rest
        if self._seen[rank] <= BASE_TRIALS:
            self._base[rank] = replace(rest, reserved_bytes=0, pinned_bytes=0) if rest.failed else rest

    def worn(self) -> str:
        """Why the processes should not go on, in words; empty: nothing speaks against it."""
        return next(filter(None, (_grown(rank, self._base[rank], now) for rank, now in self._last.items())), "")


def _grown(rank: int, base: Rest, now: Rest) -> str:
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
