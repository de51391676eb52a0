"""Records of a file that pass through memory in order: read ahead of their use, written behind it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from executor.files.rank_file import RankFile, Transfer

AHEAD = 2
"""Records that are on their way in when a use begins."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file that travel together; multiples of `rank_file.ALIGNMENT`."""

    offset: int
    size: int


class FileStream:
    """Passes over `extents` in order, again and again. Its buffers, each as large as the largest extent, take turns.

    1. `begin`: the first two are read.
    2. `take` waits for the next one alone, after the read of the one after the next has begun.
    3. `put_back` writes what was taken behind; its buffer is read into again when that has ended. `give_back` does not write.
    4. `finish` returns when all is written.
    """

    def __init__(self, file: RankFile, extents: Sequence[Extent], buffers: Sequence[memoryview]) -> None:
        """There are `BUFFERS` buffers, or as many as extents where these are fewer."""
        self.file, self._extents = file, extents
        self._free = deque(buffers)
        self._reading: deque[tuple[Transfer, memoryview]] = deque()
        self._writing: deque[tuple[Transfer, memoryview]] = deque()
        self._next = 0

    def begin(self) -> None:
        """A pass is near. Does nothing where it has begun."""
        if not self._next:
            self._read_ahead()

    def take(self) -> memoryview:
        """The buffer with the next extent, the first of which `begin` has asked for."""
        self._read_ahead()
        transfer, buffer = self._reading.popleft()
        transfer.wait()
        self._read_ahead()
        return buffer

    def fresh(self) -> memoryview:
        """A buffer to be filled and put back, instead of one that was read."""
        if not self._free:
            self._reclaim()
        return self._free.popleft()

    def put_back(self, index: int, buffer: memoryview) -> None:
        """Write the buffer to extent `index`; it may be read, and not changed, until the next call of anything."""
        extent = self._extents[index]
        self._writing.append((self.file.write(extent.offset, buffer[: extent.size]), buffer))

    def give_back(self, buffer: memoryview) -> None:
        """What was taken is as it was."""
        self._free.append(buffer)

    def finish(self) -> None:
        """Return when everything that was put back is in the file; the next pass is from the first extent on."""
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
