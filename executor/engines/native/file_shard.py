"""This rank's share of the parameters in a file: read ahead of their gathers, written behind the update (ZeRO-Infinity)."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from executor.engines.native.parameter_shard import Loaded, ParameterShard, Range
from executor.files.rank_file import ALIGNMENT, RankFile, Transfer, rounded_up
from executor.parallel.collectives import mark
from executor.parallel.host_pool import HostPool
from search_spaces.offload_files import BUFFERS, UNITS

AHEAD = UNITS - 1
"""Units that are in host memory, or on their way there, before they are gathered."""
BEHIND = BUFFERS // 2
"""Pieces of an update that are on their way to the file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Elements that are read together, and where they lie."""

    start: int
    end: int
    """The element after the last."""
    offset: int
    """In the file, bytes: from here on it is read."""
    size: int
    """Bytes that are read."""
    skip: int
    """Of these, bytes before the first element."""

    def of(self, memory: Tensor, dtype: torch.dtype) -> Tensor:
        """The elements in what was read."""
        return memory[self.skip : self.skip + (self.end - self.start) * dtype.itemsize].view(dtype)


@dataclass(slots=True)
class _Staged:
    """A unit in host memory, or on its way there; what has been gathered of it is no longer named."""

    buffer: Tensor
    views: dict[Place, tuple[Transfer, Tensor]]


class FileShard(ParameterShard):
    """Parameters in a file, in pieces as the optimizer hands them over, each from the beginning of a block on.

    1. `expect` begins to read a unit that is gathered later, into one of `AHEAD` buffers.
    2. `read` waits for what was expected, and reads by itself what was not.
    3. The update's pieces are written behind, through `BEHIND` buffers; `finish` waits for them. What was read before is stale.
    """

    reads_ahead = AHEAD

    def __init__(
        self,
        pieces: Sequence[Range],
        units: Sequence[Sequence[Range]],
        dtype: torch.dtype,
        device: torch.device,
        pool: HostPool,
        folder: Path,
    ) -> None:
        """`pieces`: of the whole vector, in which it is written; `units`: the parameters of each unit, which are read whole.

        Raises:
            EngineRefusalError: `folder` cannot be written to, or has too little room.
        """
        self._dtype, self._device = dtype, device
        self._pieces = sorted(pieces)
        sizes = [rounded_up((end - start) * dtype.itemsize) for start, end in self._pieces]
        self._offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        self._places = self._cut(units)
        self._starts = [place.start for place in self._places]
        self.file = RankFile(folder, sum(sizes))
        largest = max(sum(place.size for place in self._within(unit)) for unit in units)
        self._free = deque(pool.pages(largest) for _ in range(AHEAD))
        self._own = pool.pages(largest)
        self._staged: deque[_Staged] = deque()
        self._outgoing = deque(pool.pages(max(sizes)) for _ in range(BEHIND))
        self._written: deque[tuple[Transfer, Tensor]] = deque()

    def expect(self, ranges: Sequence[Range]) -> None:
        places = self._within(ranges)
        if any(place in staged.views for staged in self._staged for place in places):
            return
        if not self._free:
            self._forget(self._staged.popleft())
        buffer = self._free.popleft()
        self._staged.append(_Staged(buffer, self._started(places, buffer)))

    def read(self, ranges: Sequence[Range]) -> Loaded:
        places = self._within(ranges)
        values = torch.empty(sum(place.end - place.start for place in places), dtype=self._dtype, device=self._device)
        mark("buffers", values)
        targets = dict(zip(places, torch.split(values, [place.end - place.start for place in places]), strict=True))
        for staged in [*self._staged]:
            self._land({place: staged.views.pop(place) for place in places if place in staged.views}, targets)
            if not staged.views:
                self._staged.remove(staged)
                self._free.append(staged.buffer)
        for batch in [*self._batches(targets)]:
            self._land(self._started(batch, self._own), targets)
        return Loaded(values)

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

    def _cut(self, units: Sequence[Sequence[Range]]) -> list[Place]:
        """The vector cut where a piece or a parameter begins."""
        cuts = sorted({start for start, _ in self._pieces} | {start for unit in units for start, _ in unit})
        ends = [*cuts[1:], self._pieces[-1][1]]
        return [self._placed(start, end) for start, end in zip(cuts, ends, strict=True)]

    def _placed(self, start: int, end: int) -> Place:
        number = bisect_left(self._pieces, (start + 1, 0)) - 1
        offset = self._offsets[number] + (start - self._pieces[number][0]) * self._dtype.itemsize
        skip = offset % ALIGNMENT
        return Place(start, end, offset - skip, rounded_up(skip + (end - start) * self._dtype.itemsize), skip)

    def _within(self, ranges: Iterable[Range]) -> list[Place]:
        found: list[Place] = []
        for start, end in ranges:
            found += self._places[bisect_left(self._starts, start) : bisect_left(self._starts, end)]
        return found

    def _batches(self, targets: dict[Place, Tensor]) -> Iterator[list[Place]]:
        """What nobody expected, in parts that fit into the buffer of `read`'s own."""
        batch: list[Place] = []
        for place in targets:
            if batch and sum(each.size for each in (*batch, place)) > self._own.numel():
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _started(self, places: Sequence[Place], buffer: Tensor) -> dict[Place, tuple[Transfer, Tensor]]:
        views, used = {}, 0
        for place in places:
            part = buffer[used : used + place.size]
            views[place] = (self.file.read(place.offset, part.numpy().data), place.of(part, self._dtype))
            used += place.size
        return views

    def _land(self, views: dict[Place, tuple[Transfer, Tensor]], targets: dict[Place, Tensor]) -> None:
        """Copy what has been read to the device; what landed is no longer a target."""
        for place, (transfer, values) in views.items():
            transfer.wait()
            targets.pop(place).copy_(values)

    def _forget(self, staged: _Staged) -> None:
        for transfer, _ in staged.views.values():
            transfer.wait()
        self._free.append(staged.buffer)

    def _write(self, start: int, values: Tensor) -> None:
        while self._staged:
            self._forget(self._staged.popleft())
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
