"""The host memory used for offloading, counted separately from the device's."""

import mmap

import torch
from torch import Tensor


class HostPool:
    """Allocates every host tensor of an offloaded model and counts its bytes. Tensors live as long as the pool.

    On a machine without an accelerator the "device" is ordinary memory too. The pool is then a separate part of it: the same
    tensors are allocated, copied and counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._pins = device.type != "cpu"
        self._tensors: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in the pool. The allocator of pinned memory may round each up to a power of two."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def zeros(self, elements: int, dtype: torch.dtype, pinned: bool = False) -> Tensor:
        """A vector of zeros; `pinned`: in pages that a device can copy asynchronously."""
        vector = torch.zeros(elements, dtype=dtype, pin_memory=pinned and self._pins)
        self._tensors.append(vector)
        return vector

    def pages(self, size: int) -> Tensor:
        """`size` bytes of zeros, aligned to a page for direct I/O; not pinned."""
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self._tensors.append(memory)
        return memory

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything in the pool, for the memory account (tag `host`)."""
        return tuple(self._tensors)
