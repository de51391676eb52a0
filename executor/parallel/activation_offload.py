"""Offloads the tensors that blocks save for backward to host memory (`offload_activations`)."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from executor.parallel import copies
from executor.parallel.copies import Copy, CopyEngine, HostPool

LEAST_BYTES = 1024
"""Minimum size of an offloaded tensor; copying a smaller one costs more than it saves."""


class ActivationOffload:
    """Copies the saved tensors of blocks to host memory after their forward, and back before backward needs them.

    1. During a block's forward every tensor that autograd saves is copied to the host, concurrently with the computation; one
       that is saved several times is copied once. Parameters, buffers, small tensors and inputs shared with other blocks stay.
    2. When the next block has run, the device's stream waits for the copies, and the originals are freed: those of two blocks
       are on the device at once.
    3. In backward the first use of a saved tensor of a block fetches all of the block's and prefetches those of the previous
       block, whose copies overlap with this block's backward. A fetched tensor is freed after its last use; a second backward
       through the same block (zero-bubble schedules) fetches it again.

    It is applied outside checkpointing: of a recomputed block only the inputs are saved [torchtune, OffloadActivations]. Bytes
    and strides are preserved, so that results are bitwise equal. Host buffers are reused: none is allocated after the first
    step.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool, self.copies = HostPool(device), CopyEngine(device)
        self.device = device
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._latest: _BlockRun | None = None

    def attach(self, blocks: Sequence[nn.Module], keeps_last: bool) -> None:
        """Offload the saved tensors of consecutive blocks. `keeps_last`: the last block's stay, since backward follows at once.

        A block's `forward` is replaced, instead of wrapping the block, so that hooks on it (gathers) stay outside.
        """
        for index, block in enumerate(blocks[: len(blocks) - keeps_last]):
            block.forward = functools.partial(self._run, block, block.forward, index == 0)

    def take(self, size: int) -> Tensor:
        """A host buffer of at least `size` bytes; up to a quarter larger ones fit, since the rows of experts vary in number."""
        fitting = [buffer_size for buffer_size, free in self._free.items() if free and size <= buffer_size <= 1.25 * size]
        return self._free[min(fitting)].pop() if fitting else self.pool.zeros(size, torch.uint8, pinned=True)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer for reuse after the current stream's work so far."""
        self._free[buffer.numel()].append(buffer)

    def close(self) -> None:
        """Free the offloaded tensors and buffers."""
        self._latest = None
        self._free.clear()

    def _run(self, block: nn.Module, forward: Callable[..., Any], first: bool, *inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **keywords)
        stays = {_storage(value) for value in (*block.parameters(), *block.buffers())}
        inside = tree_leaves((inputs, keywords))
        stays |= {_storage(value) for value in inside if isinstance(value, Tensor) and not value.requires_grad}
        before = self._latest
        call = _BlockRun(self, None if first else before)

        def save(value: Tensor) -> "Tensor | _View":
            moves = value.device == self.device and value.nbytes >= LEAST_BYTES and _storage(value) not in stays
            return call.save(value) if moves else value

        with saved_tensors_hooks(save, _load):
            result = forward(*inputs, **keywords)
        if before is not None:
            before.free_originals()
        self._latest = call
        return result


class _BlockRun:
    """The saved tensors of one run of a block: pieces of memory, each alive as long as autograd references it."""

    def __init__(self, offload: ActivationOffload, before: "_BlockRun | None") -> None:
        self.offload, self._before = offload, before
        self._saved: WeakValueDictionary[tuple[Any, ...], _SavedPiece] = WeakValueDictionary()
        self._fetched = False

    def save(self, value: Tensor) -> "_View":
        """A view of the tensor's piece of memory; a piece is copied once, however often it is saved."""
        dense = _is_dense(value)
        # The original lives until the next block has run, so that no other tensor can reuse its memory and match its key.
        key: tuple[Any, ...] = (_storage(value), value.storage_offset(), value.numel(), value.dtype, value._version)
        key = key if dense else (*key, value.shape, value.stride())
        piece = self._saved.get(key)
        if piece is None:
            piece = self._saved[key] = _SavedPiece(self, value.detach(), dense)
        piece.uses += 1
        return _View(piece, value.shape, value.stride() if dense else value.contiguous().stride())

    def free_originals(self) -> None:
        """Free the originals as soon as they are copied."""
        for piece in [*self._saved.values()]:
            piece.free_original()

    def fetch(self) -> None:
        """Start to fetch all pieces that are not on the device. Only the first call does; later, reads fetch single pieces."""
        if not self._fetched:
            self._fetched = True
            for piece in [*self._saved.values()]:
                piece.fetch()

    def prefetch(self) -> None:
        """Start to fetch the previous block's pieces, which backward reads next."""
        before, self._before = self._before, None
        if before is not None:
            before.fetch()


class _SavedPiece:
    """A piece of memory saved by autograd: on the device, on the host, or being copied."""

    def __init__(self, call: _BlockRun, value: Tensor, dense: bool) -> None:
        self.uses = self._read = 0
        """Number of reads by one backward, and of reads so far."""
        self._call = call
        self._original: Tensor | None = value
        flat = (value if dense else value.contiguous()).as_strided((value.numel(),), (1,))
        self._flat: Tensor | None = flat
        self._elements, self._dtype, self._bytes = value.numel(), value.dtype, flat.nbytes
        self._buffer = call.offload.take(self._bytes)
        self._copy: Copy | None = call.offload.copies.start(self._on_host(), flat)

    def free_original(self) -> None:
        """Free the original once it is on the host."""
        self._wait_for_copy()
        self._original = self._flat = None

    def fetch(self) -> None:
        """Start to copy it back, if it is not on the device."""
        if self._flat is None:
            offload = self._call.offload
            self._flat = torch.empty(self._elements, dtype=self._dtype, device=offload.device)
            self._copy = offload.copies.start(self._flat, self._on_host())

    def read(self) -> Tensor:
        """The flat piece, ready for the device's current stream; after its last use it is only on the host."""
        self._call.fetch()
        self._call.prefetch()
        self.fetch()
        self._wait_for_copy()
        flat = self._flat
        assert flat is not None
        self._read += 1
        if self._read % self.uses == 0:
            self._original = self._flat = None
        return flat

    def _on_host(self) -> Tensor:
        return self._buffer[: self._bytes].view(self._dtype)

    def _wait_for_copy(self) -> None:
        """Make the current stream wait for the copy in flight."""
        copy, self._copy = self._copy, None
        if copy is not None and copy.event is not None:
            copies.current_stream(self._call.offload.device).wait_event(copy.event)

    def __del__(self) -> None:
        self._wait_for_copy()
        self._call.offload.give_back(self._buffer)


class _View(NamedTuple):
    """Represents a saved tensor in the graph."""

    piece: _SavedPiece
    shape: torch.Size
    stride: tuple[int, ...]


def _load(saved: Tensor | _View) -> Tensor:
    if not isinstance(saved, _View):
        return saved
    flat = saved.piece.read()
    return flat.as_strided(saved.shape, saved.stride, flat.storage_offset())


def _storage(value: Tensor) -> int:
    """A key that identifies a storage, even one without data."""
    key: int = value.untyped_storage()._cdata
    return key


def _is_dense(value: Tensor) -> bool:
    """Whether the elements fill a contiguous piece of memory in any order, so that the strides can be kept."""
    filled = 1
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1):
        if stride != filled:
            return False
        filled *= size
    return True
