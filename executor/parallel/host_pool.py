"""The host memory that offloading fills, counted apart from the device's."""

import mmap

import torch
from torch import Tensor


class HostPool:
    """Makes every host tensor of an offloaded model and counts its bytes. Tensors live as long as the pool.

    On a machine without an accelerator the pool is a stated second memory beside the "device", which is then ordinary memory
    too: the same tensors are made, copied to and from, and counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type != "cpu"
        self._tensors: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in the pool. The allocator of pinned memory may round each up to a power of two."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def zeros(self, elements: int, dtype: torch.dtype, pinned: bool = False) -> Tensor:
        """A vector of zeros; `pinned`: in pages that a device can copy from and to beside the host's work."""
        made = torch.zeros(elements, dtype=dtype, pin_memory=pinned and self._pins)
        self._tensors.append(made)
        return made

    def pages(self, size: int) -> Tensor:
        """`size` bytes of zeros from the start of a page on, as direct I/O wants them; not pinned."""
        made = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self._tensors.append(made)
        return made

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything in the pool, for the memory account (tag `host`)."""
        return tuple(self._tensors)
