"""What a warm process holds of its device beyond a fresh one: whether it may be to blame for what does not fit."""

import re

from executor.measurement.device import DeviceCounters
from search_spaces.failure import Sign

_WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class DeviceMemory:
    """Follows one rank process from trial to trial. Where the device does not tell, nor does this: the host is not its own."""

    def __init__(self) -> None:
        self._base: int | None = None
        self._held = 0
        self._counters: DeviceCounters | None = None

    def begin(self, counters: DeviceCounters) -> None:
        """A trial begins: what is in use now beyond what was when the first one began was left by those between."""
        if (known := counters.memory_in_use()) is None:
            return
        used, _ = known
        self._base = used if self._base is None else self._base
        self._counters, self._held = counters, max(used - self._base, 0)

    def signs(self, message: str) -> tuple[Sign, ...]:
        """LEFTOVER where an allocation failed by no more than earlier trials have left."""
        missed = missing_bytes(message, self._free()) if self._held else None
        return (Sign.LEFTOVER,) if missed is not None and self._held >= missed else ()

    def _free(self) -> int:
        # After a sticky error the device answers nothing any more, and its message is no allocator's.
        known = None if self._counters is None else self._counters.memory_in_use()
        return 0 if known is None else known[1]


def missing_bytes(message: str, free: int) -> int | None:
    """What the device lacked, by the words of torch's allocator; None: they are not its words."""
    found = _WANTED.search(message)
    return None if found is None else max(int(float(found[1]) * _UNITS[found[2]]) - free, 0)
