"""What blocks save for backward waits in host memory (`offload_activations`)."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from executor.parallel import streams
from executor.parallel.copies import Copy, CopyEngine
from executor.parallel.host_pool import HostPool

LEAST_BYTES = 1024
"""Of a tensor that leaves the device: copying a smaller one costs more than it saves."""
ROOMIER = 1.25
"""What a buffer that is used again may have, as a multiple of what is asked for."""


class ActivationOffload:
    """Copies what blocks save to host memory after they ran, and back before backward needs it.

    1. Inside of a block's forward every tensor that autograd saves is copied to the host, beside the computation; one that is
       saved several times is copied once. Parameters, buffers, small tensors and inputs that other blocks read, too, stay.
    2. When the next block has run, the device's stream waits for the copies, and the originals go: two blocks' are there.
    3. In backward the first use of anything that a block saved brings all of it back, and starts what the block before saved:
       its copies run beside this block's backward. What is back goes with its last use; a second backward through the
       same block (zero-bubble schedules) fetches it again.

    Outside of checkpointing, of a block that runs again its inputs are what is saved [torchtune, OffloadActivations]. Bytes and
    strides are as they were, so that what is computed is the same to the bit. Host buffers are used again: after the first
    step none is made.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool, self.copies = HostPool(device), CopyEngine(device)
        self.device = device
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._latest: _Call | None = None

    def attach(self, blocks: Sequence[nn.Module], keeps_last: bool) -> None:
        """Offload what these neighbours save. `keeps_last`: backward follows at once, so that the last one's stays.

        A block's `forward` is replaced, not the block wrapped, so that hooks on it (gathers) stay outside.
        """
        for place, block in enumerate(blocks[: len(blocks) - keeps_last]):
            block.forward = functools.partial(self._run, block, block.forward, place == 0)

    def take(self, size: int) -> Tensor:
        """A host buffer of so many bytes, or a little more: rows of experts are another number each time."""
        fitting = [held for held, free in self._free.items() if free and size <= held <= ROOMIER * size]
        return self._free[min(fitting)].pop() if fitting else self.pool.zeros(size, torch.uint8, pinned=True)

    def give_back(self, buffer: Tensor) -> None:
        """Nothing reads the buffer any more, or starts to before the current stream's work so far has ended."""
        self._free[buffer.numel()].append(buffer)

    def close(self) -> None:
        """Let go of what waits."""
        self._latest = None
        self._free.clear()

    def _run(self, block: nn.Module, forward: Callable[..., Any], first: bool, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        stays = {_storage(value) for value in (*block.parameters(), *block.buffers())}
        inside = tree_leaves((inputs, named))
        stays |= {_storage(value) for value in inside if isinstance(value, Tensor) and not value.requires_grad}
        before = self._latest
        call = _Call(self, None if first else before)

        def save(value: Tensor) -> "Tensor | _View":
            moves = value.device == self.device and value.nbytes >= LEAST_BYTES and _storage(value) not in stays
            return call.save(value) if moves else value

        with saved_tensors_hooks(save, _bring):
            result = forward(*inputs, **named)
        if before is not None:
            before.leave()
        self._latest = call
        return result


class _Call:
    """What one run of a block has saved: pieces of memory, each there as long as autograd wants it."""

    def __init__(self, offload: ActivationOffload, before: "_Call | None") -> None:
        self.offload, self._before = offload, before
        self._saved: WeakValueDictionary[tuple[Any, ...], _Piece] = WeakValueDictionary()
        self._fetched = False

    def save(self, value: Tensor) -> "_View":
        """A view of the piece of memory that the tensor is; pieces are copied once, however often they are saved."""
        dense = _is_dense(value)
        # The original is held until the next block has run: no other tensor has its memory meanwhile.
        key: tuple[Any, ...] = (_storage(value), value.storage_offset(), value.numel(), value.dtype, value._version)
        key = key if dense else (*key, value.shape, value.stride())
        piece = self._saved.get(key)
        if piece is None:
            piece = self._saved[key] = _Piece(self, value.detach(), dense)
        piece.uses += 1
        return _View(piece, value.shape, value.stride() if dense else value.contiguous().stride())

    def leave(self) -> None:
        """Let the originals go, as soon as they are copied."""
        for piece in [*self._saved.values()]:
            piece.leave()

    def fetch(self) -> None:
        """Start to bring everything back that is not there; once, after which each comes when it is read."""
        if not self._fetched:
            self._fetched = True
            for piece in [*self._saved.values()]:
                piece.fetch()

    def fetch_before(self) -> None:
        """Start what backward reads next."""
        before, self._before = self._before, None
        if before is not None:
            before.fetch()


class _Piece:
    """Memory that autograd saved: on the device, on the host, or on its way."""

    def __init__(self, call: _Call, value: Tensor, dense: bool) -> None:
        self.uses = self._read = 0
        """Times that a backward reads it, and has read it."""
        self._call = call
        self._original: Tensor | None = value
        flat = (value if dense else value.contiguous()).as_strided((value.numel(),), (1,))
        self._flat: Tensor | None = flat
        self._elements, self._dtype, self._bytes = value.numel(), value.dtype, flat.nbytes
        self._buffer = call.offload.take(self._bytes)
        self._copy: Copy | None = call.offload.copies.start(self._on_host(), flat)

    def leave(self) -> None:
        """Let the original go, once it is on the host."""
        self._arrive()
        self._original = self._flat = None

    def fetch(self) -> None:
        """Start to bring it back, where it is not there."""
        if self._flat is None:
            offload = self._call.offload
            self._flat = torch.empty(self._elements, dtype=self._dtype, device=offload.device)
            self._copy = offload.copies.start(self._flat, self._on_host())

    def read(self) -> Tensor:
        """All of it, for the device's current stream; after its last use it is on the host alone."""
        self._call.fetch()
        self._call.fetch_before()
        self.fetch()
        self._arrive()
        flat = self._flat
        assert flat is not None
        self._read += 1
        if self._read % self.uses == 0:
            self._original = self._flat = None
        return flat

    def _on_host(self) -> Tensor:
        return self._buffer[: self._bytes].view(self._dtype)

    def _arrive(self) -> None:
        """Let the current stream's further work come after the copy that is on its way."""
        copy, self._copy = self._copy, None
        if copy is not None and copy.event is not None:
            streams.current_stream(self._call.offload.device).wait_event(copy.event)

    def __del__(self) -> None:
        self._arrive()
        self._call.offload.give_back(self._buffer)


class _View(NamedTuple):
    """What stands in the graph for a tensor."""

    piece: _Piece
    shape: torch.Size
    stride: tuple[int, ...]


def _bring(saved: Tensor | _View) -> Tensor:
    if not isinstance(saved, _View):
        return saved
    flat = saved.piece.read()
    return flat.as_strided(saved.shape, saved.stride, flat.storage_offset())


def _storage(value: Tensor) -> int:
    """What tells storages apart, also those that hold no data."""
    key: int = value.untyped_storage()._cdata
    return key


def _is_dense(value: Tensor) -> bool:
    """Whether the elements fill one piece of memory, in whatever order: then strides can stay as they are."""
    filled = 1
    for stride, size in sorted((stride, size) for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1):
        if stride != filled:
            return False
        filled *= size
    return True
