"""Streams the records of a file through memory in order: reads them ahead of their use, writes them back behind it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from executor.files.rank_file import RankFile, Transfer

AHEAD = 2
"""Number of reads in flight when a record is first used."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A byte range that is transferred as a whole; both fields are multiples of `rank_file.ALIGNMENT`."""

    offset: int
    size: int


class FileStream:
    """Passes over `extents` in order, repeatedly. It cycles through its buffers, each as large as the largest extent.

    1. `begin` starts reading the first two extents.
    2. `take` waits for the next extent only, after it has started the read of the one that follows.
    3. `put_back` writes a taken buffer asynchronously; the buffer is reused once the write ends. `give_back` does not write.
    4. `finish` returns when everything is written.
    """

    def __init__(self, file: RankFile, extents: Sequence[Extent], buffers: Sequence[memoryview]) -> None:
        """Pass `BUFFERS` buffers, or one per extent if there are fewer extents."""
        self.file, self._extents = file, extents
        self._free = deque(buffers)
        self._reading: deque[tuple[Transfer, memoryview]] = deque()
        self._writing: deque[tuple[Transfer, memoryview]] = deque()
        self._next = 0

    def begin(self) -> None:
        """Start reading ahead for the next pass. Does nothing if the pass has begun."""
        if not self._next:
            self._read_ahead()

    def take(self) -> memoryview:
        """Return the buffer that holds the next extent; `begin` has started the read of the first one."""
        self._read_ahead()
        transfer, buffer = self._reading.popleft()
        transfer.wait()
        self._read_ahead()
        return buffer

    def fresh(self) -> memoryview:
        """Return a buffer to fill and put back, instead of one that was read."""
        if not self._free:
            self._reclaim()
        return self._free.popleft()

    def put_back(self, index: int, buffer: memoryview) -> None:
        """Write the buffer to extent `index`. The caller may read it, but not change it, until the next call of any method."""
        extent = self._extents[index]
        self._writing.append((self.file.write(extent.offset, buffer[: extent.size]), buffer))

    def give_back(self, buffer: memoryview) -> None:
        """Return an unchanged buffer; nothing is written."""
        self._free.append(buffer)

    def finish(self) -> None:
        """Return when everything that was put back is in the file; the next pass starts at the first extent."""
        while self._writing:
            self._reclaim()
        self._next = 0

    def _read_ahead(self) -> None:
        while len(self._reading) < AHEAD and self._next < len(self._extents) and (self._free or self._writing):
            extent, buffer = self._extents[self._next], self.fresh()
            self._reading.append((self.file.read(extent.offset, buffer[: extent.size]), buffer))
            self._next += 1

    def _reclaim(self) -> None:
        transfer, buffer = self._writing.popleft()
        transfer.wait()
        self._free.append(buffer)
