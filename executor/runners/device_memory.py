"""Tracks the device memory that a warm process holds beyond a fresh one, which may be the cause of an out-of-memory error."""

import re

from executor.measurement.device import DeviceCounters
from search_spaces.failure import Sign

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
