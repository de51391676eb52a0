"""The offloaded share of an AdamW in a file: chunks are read ahead of their update and written after it (ZeRO-Infinity)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from executor.engines.native.offload import Hyperparameters, Initial, MakeShare, OffloadedShare, Span, host_adamw, updated
from executor.files.file_stream import Extent, FileStream
from executor.files.rank_file import RankFile, folder_of, rounded_up
from executor.parallel.host_pool import HostPool
from executor.parallel.initialization import FirstValues
from search_spaces.training.offload_files import BUFFERS
from search_spaces.trial import Workload

_LINE = 64
"""Bytes of a cache line; each part of a record is aligned to it."""


@dataclass(frozen=True, slots=True)
class Record:
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


def records(chunks: Sequence[Span], itemsize: int) -> list[Record]:
    """The records of chunks, stored consecutively."""
    found, offset = [], 0
    for chunk in chunks:
        elements = chunk.end - chunk.start
        part = rounded_up(elements * itemsize, _LINE)
        extent = Extent(offset, rounded_up(3 * part))
        found.append(Record(extent, elements, part))
        offset += extent.size
    return found


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
