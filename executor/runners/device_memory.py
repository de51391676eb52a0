"""What a warm process holds of its device beyond a fresh one: whether it may be to blame for what does not fit."""

import re

import torch

from search_spaces.failure import Sign

_WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class DeviceMemory:
    """Follows one rank process from trial to trial. Without CUDA it tells nothing: the host's memory is not its own."""

    def __init__(self) -> None:
        self._base: int | None = None
        self._held = 0
        self._device: torch.device | None = None

    def begin(self, device: torch.device) -> None:
        """A trial begins: what is in use now beyond what was when the first one began was left by those between."""
        if device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(device)
        self._base = total - free if self._base is None else self._base
        self._device, self._held = device, max(total - free - self._base, 0)

    def signs(self, message: str) -> tuple[Sign, ...]:
        """LEFTOVER where an allocation failed by no more than earlier trials have left."""
        missed = missing_bytes(message, self._free()) if self._held else None
        return (Sign.LEFTOVER,) if missed is not None and self._held >= missed else ()

    def _free(self) -> int:
        # After a sticky error the device answers nothing any more, and its message is no allocator's.
        try:
            return torch.cuda.mem_get_info(self._device)[0]
        except RuntimeError:
            return 0


def missing_bytes(message: str, free: int) -> int | None:
    """What the device lacked, by the words of torch's allocator; None: they are not its words."""
    found = _WANTED.search(message)
    return None if found is None else max(int(float(found[1]) * _UNITS[found[2]]) - free, 0)
