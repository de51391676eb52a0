"""Streams of a device, copies between device and host that overlap with its work, and the host memory that they use."""

import mmap
from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def make_stream(device: torch.device) -> torch.Stream | None:
    """A new stream of the device; None: the device has no streams and runs everything in order."""
    return torch.Stream(device) if device.type != "cpu" else None


def current_stream(device: torch.device) -> torch.Stream:
    """The device's current stream; only for devices with streams (`make_stream`)."""
    return torch.accelerator.current_stream(device)


def working_stream(device: torch.device) -> torch.Stream | None:
    """The device's current stream; None: the device has no streams."""
    return current_stream(device) if device.type != "cpu" else None


def resumed(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Context in which work runs on `stream`, after all work that the current stream has so far.

    Autograd runs the hooks of a gradient on the stream on which it first met the parameter. That need not be the stream of the
    training step, whose other work would not wait for what the hook starts.
    """
    if stream is None:
        return nullcontext()
    current = current_stream(stream.device)
    if current == stream:
        return nullcontext()
    stream.wait_stream(current)
    return stream


def is_on_host(value: Tensor) -> bool:
    """Whether the tensor is in host memory."""
    return value.device.type == "cpu"


PORTABLE = 1
"""`cudaHostRegisterPortable`: pages are pinned for all devices of the process."""


class _PinnedPages(mmap.mmap):
    """Pages that the driver knows, so that a device copies them asynchronously. Unlike torch's pinned memory, whose allocator
    rounds sizes up to powers of two, they take no more than their size."""

    def __new__(cls, size: int) -> "_PinnedPages":
        return super().__new__(cls, -1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, size: int) -> None:
        """Raises:
        RuntimeError: the driver refuses, for example beyond the limit of locked memory.
        """
        self._address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(self._address, size, PORTABLE))  # type: ignore[no-untyped-call]
        if error:
            raise RuntimeError(
                f"{size} bytes of host memory cannot be pinned: CUDA error {error}; offload less, or raise ulimit -l"
            )

    def __del__(self) -> None:
        # Before the pages are unmapped. It fails where the process ends and the driver is gone, which releases them as well.
        torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]


class HostPool:
    """Allocates every host tensor of an offloaded model and counts its bytes. Tensors live as long as the pool.

    On a machine without an accelerator the "device" is ordinary memory too. The pool is then a separate part of it: the same
    tensors are allocated, copied and counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._pins, self._registers = device.type != "cpu", device.type == "cuda"
        self._tensors: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in the pool. For devices other than CUDA's torch pins memory, which may round each up to a power
        of two."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def zeros(self, elements: int, dtype: torch.dtype, pinned: bool = False) -> Tensor:
        """A vector of zeros; `pinned`: in pages that a device can copy asynchronously."""
        if pinned and self._registers and elements:
            return self.pages(elements * dtype.itemsize).view(dtype)
        self._tensors.append(torch.zeros(elements, dtype=dtype, pin_memory=pinned and self._pins))
        return self._tensors[-1]

    def pages(self, size: int) -> Tensor:
        """`size` bytes of zeros, aligned to a page for direct I/O, which a CUDA device can copy asynchronously."""
        memory = torch.frombuffer(_PinnedPages(size) if self._registers else mmap.mmap(-1, size), dtype=torch.uint8)
        self._tensors.append(memory)
        return memory

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything in the pool, for the memory account (tag `host`)."""
        return tuple(self._tensors)


BUFFERS = 2
"""Staging buffers per direction: one is copied while the other is filled or read."""


class Copy:
    """A copy in flight. It references its tensors, so that their memory is not reused before the copy has ended."""

    def __init__(self, target: Tensor, source: Tensor, stream: torch.Stream | None, event: torch.Event | None) -> None:
        self.target, self.source = target, source
        self._stream, self.event = stream, event

    def wait(self) -> None:
        """Return when the target may be used: by the device's current stream, or by the host if it is on the host."""
        if self.event is None:
            return
        if is_on_host(self.target):
            self.event.synchronize()
        else:
            current_stream(self.target.device).wait_event(self.event)

    def end(self) -> None:
        """Return when the copy has also ended on the device, so that a source on the host may be overwritten."""
        if self.event is not None:
            self.event.synchronize()

    def followed(self) -> AbstractContextManager[object]:
        """Context in which started work runs after the copy, without blocking the current stream."""
        return self._stream if self._stream is not None else nullcontext()


class CopyEngine:
    """Starts copies in order, on one stream per direction, since devices can copy in both directions at once."""

    def __init__(self, device: torch.device) -> None:
        self._to_host, self._to_device = make_stream(device), make_stream(device)

    def start(self, target: Tensor, source: Tensor) -> Copy:
        """Copy `source` to `target` (one on the device, one in pinned host memory), after the current stream's work so far."""
        stream = self._to_host if is_on_host(target) else self._to_device
        if stream is None:
            target.copy_(source)
            return Copy(target, source, None, None)
        stream.wait_stream(current_stream(stream.device))
        with stream:
            target.copy_(source, non_blocking=True)
        return Copy(target, source, stream, stream.record_event())


class Staging:
    """Alternating pinned buffers, through which chunks of at most `elements` move to and from unpinned host memory."""

    def __init__(self, elements: int, dtype: torch.dtype, pool: HostPool, copies: CopyEngine) -> None:
        self._free = deque(pool.zeros(elements, dtype, pinned=True) for _ in range(BUFFERS))
        self._sent: deque[tuple[Copy, Tensor]] = deque()
        self._copies = copies

    def fetch(self, source: Tensor) -> Copy:
        """Copy a vector from the device into a buffer. At most `BUFFERS` are in use; call `give_back` for the oldest first."""
        buffer = self._free.popleft()
        copy = self._copies.start(buffer[: source.numel()], source)
        self._sent.append((copy, buffer))
        return copy

    def send(self, target: Tensor, source: Tensor) -> None:
        """Cast a vector on the host to the buffer's dtype and copy it to `target` on the device."""
        if not self._free:
            self.give_back()
        buffer = self._free.popleft()
        buffer[: source.numel()].copy_(source)
        self._sent.append((self._copies.start(target, buffer[: source.numel()]), buffer))

    def give_back(self) -> None:
        """Wait for the copy of the oldest buffer in use, and free the buffer."""
        copy, buffer = self._sent.popleft()
        copy.end()
        self._free.append(buffer)

    def finish(self) -> None:
        """Make the current stream wait for everything that was sent, and free every buffer."""
        for copy, _ in self._sent:
            copy.wait()
        while self._sent:
            self.give_back()
