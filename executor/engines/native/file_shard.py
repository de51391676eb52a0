"""States in files (ZeRO-Infinity): this rank's parameters, read ahead of gathers, and the offloaded share of AdamW."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from executor.engines.native.offload import Hyperparameters, Initial, MakeShare, OffloadedShare, Span, host_adamw, updated
from executor.engines.native.parameter_shard import Loaded, ParameterShard, Range
from executor.files.rank_file import ALIGNMENT, Extent, FileStream, RankFile, Transfer, folder_of, rounded_up
from executor.parallel.collectives import mark
from executor.parallel.copies import Copy, CopyEngine, HostPool
from executor.parallel.initialization import FirstValues
from search_spaces.training.states import BUFFERS, UNITS
from search_spaces.trial import Workload

AHEAD = UNITS - 1
"""Units that are in host memory, or being read, before they are gathered."""
BEHIND = BUFFERS // 2
"""Maximum number of pieces of an update that are being written to the file."""


@dataclass(frozen=True, slots=True)
class FileExtent:
    """Elements that are read together, and their location in the file."""

    start: int
    end: int
    """The element after the last."""
    offset: int
    """First byte that is read from the file."""
    size: int
    """Number of bytes that are read."""
    skip: int
    """Number of these bytes before the first element."""

    def of(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """The elements in the bytes that were read."""
        return memory[self.skip : self.skip + (self.end - self.start) * dtype.itemsize].view(dtype)


@dataclass(slots=True, eq=False)
class _Staged:
    """A unit in host memory or being read; extents that have been gathered are removed."""

    buffer: Tensor
    views: dict[FileExtent, tuple[Transfer, Tensor]]
    copies: list[Copy] = field(default_factory=list)
    """Copies of it to the device; before they end, nothing else may be read into the buffer."""


class FileShard(ParameterShard):
    """Parameters in a file, in the pieces in which the optimizer passes them; each piece starts at a block boundary.

    1. `expect` starts to read a unit that will be gathered later, into one of `AHEAD` buffers.
    2. `read` waits for expected units, and reads others itself.
    3. The update's pieces are written asynchronously through `BEHIND` buffers; `finish` waits for them. Older reads are stale.
    """

    reads_ahead = AHEAD

    def __init__(
        self,
        pieces: Sequence[Range],
        units: Sequence[Sequence[Range]],
        dtype: torch.dtype,
        device: torch.device,
        pool: HostPool,
        copies: CopyEngine,
        folder: Path,
    ) -> None:
        """`pieces`: ranges of the vector that are written as a whole; `units`: the parameters of each unit, read as a whole.

        Raises:
            EngineRefusalError: `folder` cannot be written to, or has too little space.
        """
        self._dtype, self._device = dtype, device
        self._pieces = sorted(pieces)
        sizes = [rounded_up((end - start) * dtype.itemsize) for start, end in self._pieces]
        self._offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self._extents = self._cut(units)
        self._starts = [extent.start for extent in self._extents]
        self.file = RankFile(folder, sum(sizes))
        largest = max(sum(extent.size for extent in self._within(unit)) for unit in units)
        self._copies = copies
        self._free: deque[tuple[Tensor, list[Copy]]] = deque((pool.pages(largest), []) for _ in range(AHEAD))
        self._own: tuple[Tensor, list[Copy]] = pool.pages(largest), []
        self._staged: deque[_Staged] = deque()
        self._outgoing = deque(pool.pages(max(sizes)) for _ in range(BEHIND))
        self._written: deque[tuple[Transfer, Tensor]] = deque()

    def expect(self, ranges: Sequence[Range]) -> None:
        extents = self._within(ranges)
        if any(extent in staged.views for staged in self._staged for extent in extents):
            return
        if not self._free:
            self._discard(self._staged.popleft())
        buffer, leaving = self._free.popleft()
        self._staged.append(_Staged(buffer, self._start_reads(extents, buffer, leaving)))

    def read(self, ranges: Sequence[Range]) -> Loaded:
        extents = self._within(ranges)
        values = torch.empty(sum(extent.end - extent.start for extent in extents), dtype=self._dtype, device=self._device)
        mark("buffers", values)
        targets = dict(zip(extents, torch.split(values, [extent.end - extent.start for extent in extents]), strict=True))
        started: list[Copy] = []
        for staged in [*self._staged]:
            staged.copies += self._land(
                {extent: staged.views.pop(extent) for extent in extents if extent in staged.views}, targets
            )
            started += staged.copies
            if not staged.views:
                self._staged.remove(staged)
                self._free.append((staged.buffer, staged.copies))
        buffer, leaving = self._own
        for batch in [*self._batches(targets)]:
            leaving += self._land(self._start_reads(batch, buffer, leaving), targets)
            started += leaving
        return Loaded(values, tuple(started))

    def accept_from_device(self, start: int, values: Tensor) -> None:
        begins = (start, start + values.numel())
        for first, end in self._pieces[bisect_left(self._pieces, (begins[0], 0)) : bisect_left(self._pieces, (begins[1], 0))]:
            self._write(first, values[first - start : end - start])

    def accept_from_host(self, start: int, values: Tensor) -> None:
        self._write(start, values)

    def finish(self) -> None:
        while self._written:
            self._reclaim()

    def tensors(self) -> Iterator[Tensor]:
        return iter(())

    def close(self) -> None:
        self.file.close()

    def _cut(self, units: Sequence[Sequence[Range]]) -> list[FileExtent]:
        """The vector, cut at every start of a piece or parameter."""
        cuts = sorted({start for start, _ in self._pieces} | {start for unit in units for start, _ in unit})
        ends = [*cuts[1:], self._pieces[-1][1]]
        return [self._make_extent(start, end) for start, end in zip(cuts, ends, strict=True)]

    def _make_extent(self, start: int, end: int) -> FileExtent:
        number = bisect_left(self._pieces, (start + 1, 0)) - 1
        offset = self._offsets[number] + (start - self._pieces[number][0]) * self._dtype.itemsize
        skip = offset % ALIGNMENT
        return FileExtent(start, end, offset - skip, rounded_up(skip + (end - start) * self._dtype.itemsize), skip)

    def _within(self, ranges: Iterable[Range]) -> list[FileExtent]:
        extents: list[FileExtent] = []
        for start, end in ranges:
            extents += self._extents[bisect_left(self._starts, start) : bisect_left(self._starts, end)]
        return extents

    def _batches(self, targets: dict[FileExtent, Tensor]) -> Iterator[list[FileExtent]]:
        """The extents that were not expected, in batches that fit into the buffer of `read`."""
        batch: list[FileExtent] = []
        for extent in targets:
            if batch and sum(batched.size for batched in (*batch, extent)) > self._own[0].numel():
                yield batch
                batch = []
            batch.append(extent)
        if batch:
            yield batch

    def _start_reads(
        self, extents: Sequence[FileExtent], buffer: Tensor, leaving: list[Copy]
    ) -> dict[FileExtent, tuple[Transfer, Tensor]]:
        """Read into the buffer, after the copies of what was in it have ended; forgets these."""
        for copy in leaving:
            copy.end()
        leaving.clear()
        views, used = {}, 0
        for extent in extents:
            part = buffer[used : used + extent.size]
            views[extent] = (self.file.read(extent.offset, part.numpy().data), extent.of(part, self._dtype))
            used += extent.size
        return views

    def _land(self, views: dict[FileExtent, tuple[Transfer, Tensor]], targets: dict[FileExtent, Tensor]) -> list[Copy]:
        """Start to copy extents to the device once they are read, and remove them from `targets`. The device waits for none."""
        started = []
        for extent, (transfer, values) in views.items():
            transfer.wait()
            started.append(self._copies.start(targets.pop(extent), values))
        return started

    def _discard(self, staged: _Staged) -> None:
        for transfer, _ in staged.views.values():
            transfer.wait()
        self._free.append((staged.buffer, staged.copies))

    def _write(self, start: int, values: Tensor) -> None:
        while self._staged:
            self._discard(self._staged.popleft())
        if not self._outgoing:
            self._reclaim()
        buffer, size = self._outgoing.popleft(), values.numel() * self._dtype.itemsize
        buffer[:size].view(self._dtype).copy_(values)
        offset = self._offsets[bisect_left(self._pieces, (start, start))]
        memory = buffer[: rounded_up(size)].numpy().data
        self._written.append((self.file.write(offset, memory), buffer))

    def _reclaim(self) -> None:
        transfer, buffer = self._written.popleft()
        transfer.wait()
        self._outgoing.append(buffer)


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """Location of a chunk's master, first moment and second moment, which are stored consecutively."""

    extent: Extent
    elements: int
    part: int
    """Bytes from the start of one part to the start of the next."""

    def parts(self, buffer: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Master and moments [elements] in a buffer of bytes."""
        parts = (buffer[index * self.part : (index + 1) * self.part].view(dtype)[: self.elements] for index in range(3))
        master, first, second = parts
        return master, first, second


def records(chunks: Sequence[Span], itemsize: int) -> list[ChunkRecord]:
    """The records of chunks, stored consecutively."""
    rows, offset = [], 0
    for chunk in chunks:
        elements = chunk.end - chunk.start
        part = rounded_up(elements * itemsize, 64)  # bytes of a cache line, to which parts are aligned
        extent = Extent(offset, rounded_up(3 * part))
        rows.append(ChunkRecord(extent, elements, part))
        offset += extent.size
    return rows


class FileShare(OffloadedShare):
    """Master and moments in a file of this rank, with four buffers in host memory. See `FileStream` for the order of transfers.

    The first chunks are read while gradients are still being computed. A step moves every byte of the share once in each
    direction, both directions concurrently [Rajbhandari et al. 2021, ZeRO-Infinity, 5.2].
    """

    def __init__(
        self, initial: Initial, hyperparameters: Hyperparameters, chunks: Sequence[Span], pool: HostPool, folder: Path
    ) -> None:
        """See `MakeShare`.

        Raises:
            EngineRefusalError: `folder` cannot be written to, or has too little space.
        """
        self._dtype, self._hyperparameters = initial.dtype, hyperparameters
        self._records = records(chunks, initial.dtype.itemsize)
        extents = [record.extent for record in self._records]
        self.file = RankFile(folder, sum(extent.size for extent in extents))
        self._steps = pool.zeros(len(chunks), torch.float32)
        largest = max(extent.size for extent in extents)
        buffers = [pool.pages(largest).numpy().data for _ in range(min(BUFFERS, len(extents)))]
        self._stream = FileStream(self.file, extents, buffers)
        for index, chunk in enumerate(chunks):
            self._write_first(index, initial.values, chunk.start)
        self.finish()

    def begin(self) -> None:
        self._stream.begin()

    def step(self, index: int, gradient: Tensor) -> Tensor:
        buffer = self._stream.take()
        master, *moments = self._parts(index, buffer)
        optimizer = host_adamw(master, (moments[0], moments[1]), self._steps[index], self._hyperparameters)
        values = updated(optimizer, gradient)
        self._stream.put_back(index, buffer)
        return values

    def values(self) -> Iterator[Tensor]:
        self._stream.begin()
        for index in range(len(self._records)):
            buffer = self._stream.take()
            yield self._parts(index, buffer)[0]
            self._stream.give_back(buffer)
        self.finish()

    def finish(self) -> None:
        self._stream.finish()

    def close(self) -> None:
        self.file.close()

    def _write_first(self, index: int, values: FirstValues, start: int) -> None:
        buffer = self._stream.fresh()
        master, first, second = self._parts(index, buffer)
        values.fill(master, start)
        first.zero_()
        second.zero_()
        self._stream.put_back(index, buffer)

    def _parts(self, index: int, buffer: memoryview) -> tuple[Tensor, Tensor, Tensor]:
        return self._records[index].parts(torch.frombuffer(buffer, dtype=torch.uint8), self._dtype)


def share_in_files(workload: Workload) -> MakeShare:
    """A function that creates shares in the job's `nvme_path`.

    Raises:
        EngineRefusalError: the job sets no `nvme_path`.
    """
    return partial(FileShare, folder=folder_of(workload))
