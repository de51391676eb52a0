"""The memory of a dry run: live storages, the peak of a step by tag, and what allocator and communication backend add."""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.engine import HOST, TAGS
from executor.errors import RunnerError

_RESIZE = torch.UntypedStorage.resize_


@dataclass(slots=True)
class _StorageBlock:
    """The memory of one storage."""

    size: int
    tag: str
    counted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The memory of one step, in bytes; fields as in `DryRank`."""

    peak: int
    by_tag: dict[str, int]
    tag_peaks: dict[str, int]
    host: int


class Ledger:
    """Tracks all storages of a dry run; accounting starts with `open`.

    A storage is identified by the address of its `StorageImpl`, because tensors without data have no other address. It dies
    with its last tensor. A tag holds for a block's whole life, even if it is set late.
    """

    def __init__(self, rounding_bytes: int = 1) -> None:
        self._rounding = rounding_bytes
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], _StorageBlock]] = {}
        self._changes: list[tuple[int, _StorageBlock]] = []
        self._is_open = False
        self._first: list[_StorageBlock] = []
        self._host = 0

    def track(self, value: Tensor) -> None:
        """Register the storage of a tensor that an operator returned, unless it is known."""
        storage = value.untyped_storage()
        key = storage._cdata
        if (entry := self._known.get(key)) is not None:
            if not entry[1].size and storage.size():
                # FakeTensorMode creates a cached view by `set_`, which restores the size of an emptied storage.
                _RESIZE(storage, 0)
            return
        block = _StorageBlock(self._rounded(storage.size()), "activations", self._is_open)
        self._known[key] = weakref.ref(storage, lambda _: self._died(key)), block
        if self._is_open:
            self._changes.append((block.size, block))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has a new size."""
        entry = self._known.get(storage._cdata)
        if entry is None:
            return
        block = entry[1]
        if block.counted and block.size:
            self._changes.append((-block.size, block))
        # The resized storage is a new allocation, whose tag is set anew.
        new = _StorageBlock(self._rounded(storage.size()), "activations", self._is_open)
        self._known[storage._cdata] = entry[0], new
        if self._is_open and new.size:
            self._changes.append((new.size, new))

    def allocate(self, size: int, tag: str) -> object:
        """Allocate memory without a tensor; it is released when the returned object is deleted."""
        token = _Token()
        if self._is_open and size:
            block = _StorageBlock(self._rounded(size), tag, True)
            self._changes.append((block.size, block))
            weakref.finalize(token, self._changes.append, (-block.size, block))
        return token

    def mark(self, tag: str, value: Tensor) -> None:
        """Set the tag that the engine gives for this tensor's memory."""
        entry = self._known.get(value.untyped_storage()._cdata)
        if entry is not None:
            entry[1].tag = tag

    def open(self, tagged_tensors: Iterable[tuple[str, Tensor]], standing: int = 0) -> None:
        """Start accounting with the storages that the engine names, and `standing` bytes of buffers that libraries hold. The
        first tag given for a storage holds."""
        self._changes, self._first = [], [_StorageBlock(standing, "buffers", True)]
        host: dict[int, int] = {}
        for tag, value in tagged_tensors:
            self.track(value)
            key = value.untyped_storage()._cdata
            block = self._known[key][1]
            if tag == HOST:
                host[key] = block.size
            elif block.size and not block.counted:
                block.tag, block.counted = tag, True
                self._first.append(block)
        self._host = sum(host.values())
        self._is_open = True

    @property
    def changes(self) -> list[int]:
        """Bytes allocated (positive) and released (negative) since `open`, in order."""
        return [size for size, _ in self._changes]

    def position(self) -> int:
        """Number of changes so far."""
        return len(self._changes)

    def close(self) -> StepMemory:
        """Stop accounting and return the peak."""
        self._is_open = False
        now = Counter[str]()
        for block in self._first:
            now[block.tag] += block.size
        highest, peak, at_peak = Counter(now), now.total(), Counter(now)
        total = peak
        for size, block in self._changes:
            now[block.tag] += size
            total += size
            highest[block.tag] = max(highest[block.tag], now[block.tag])
            if total > peak:
                peak, at_peak = total, Counter(now)
        return StepMemory(
            peak=peak,
            by_tag={tag: at_peak[tag] for tag in TAGS},
            tag_peaks={tag: highest[tag] for tag in TAGS},
            host=self._host,
        )

    def _died(self, key: int) -> None:
        _, block = self._known.pop(key)
        if block.counted and self._is_open and block.size:
            self._changes.append((-block.size, block))

    def _rounded(self, size: int) -> int:
        return -(-size // self._rounding) * self._rounding


class _Token:
    """Represents memory without a tensor."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationBackend:
    """A communication backend and the device that it is used with."""

    name: str
    device_kind: str
    """cpu or cuda."""
    copies: frozenset[str] = frozenset()
    """Operations for which the backend copies the full message. The copy lives until the program has waited for the work."""
    rounding_bytes: int = 1
    """Every allocation is rounded up to a multiple of this."""
    workspace_bytes: int = 0
    """What libraries take from the allocator once, for all steps."""


BACKENDS: Mapping[str, CommunicationBackend] = {
    # torch 2.13, ProcessGroupGloo.cpp: `reduce_scatter_tensor_coalesced` clones its input and all-reduces the clone, which
    # lives as long as the work; `AsyncAllgatherWork` gathers into a flat tensor and copies that into the output. All-reduce,
    # broadcast and send work in the caller's memory. The CPU allocator reports the requested bytes.
    "gloo": CommunicationBackend(name="gloo", device_kind="cpu", copies=frozenset({"reduce_scatter", "all_gather"})),
    # NCCL reduces and gathers between the callers' buffers; its own channels are outside of torch's allocator
    # (`non_torch_bytes`). CUDACachingAllocator.cpp, `kMinBlockSize`: blocks are multiples of 512 bytes. cuBLAS gets 32 MiB on
    # Hopper and newer, for the thread of forward and for that of backward (8 MiB on older devices) [CUDABlas.cpp].
    "nccl": CommunicationBackend(name="nccl", device_kind="cuda", rounding_bytes=512, workspace_bytes=2 * 32 << 20),
}


def backend_of(name: str) -> CommunicationBackend:
    """Return the backend of that name.

    Raises:
        RunnerError: there is no such backend.
    """
    if name not in BACKENDS:
        raise RunnerError(f"there is no backend {name!r} for a dry run; use one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
