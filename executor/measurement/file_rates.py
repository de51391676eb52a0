"""How fast a folder's file system is, read and written as the engine reads and writes it. Imports no torch."""

import mmap
import time
from pathlib import Path

from executor.files.file_stream import Extent, FileStream
from executor.files.rank_file import RankFile
from search_spaces.offload_files import BUFFERS

QUICK_BYTES = 16 << 20
"""Of an extent of the quick look: four of them are moved each way."""


class FilePass:
    """A file of so many bytes, with passes over it: what a step of the optimizer does to its states, less the arithmetic."""

    def __init__(self, folder: Path, extents: int, extent_bytes: int) -> None:
        """Makes the file and fills it once.

        Raises:
            EngineRefusalError: the folder cannot be written to, or has too little room.
        """
        self.size = extents * extent_bytes
        self.file = RankFile(folder, self.size)
        self._count = extents
        places = [Extent(number * extent_bytes, extent_bytes) for number in range(extents)]
        buffers = [memoryview(mmap.mmap(-1, extent_bytes)) for _ in range(min(BUFFERS, extents))]
        self._stream = FileStream(self.file, places, buffers)
        for number in range(extents):
            self._stream.put_back(number, self._stream.fresh())
        self._stream.finish()

    def read(self) -> None:
        """Every byte once into memory."""
        self._stream.begin()
        for _ in range(self._count):
            self._stream.give_back(self._stream.take())
        self._stream.finish()

    def update(self) -> None:
        """Every byte once in each direction, both at a time."""
        self._stream.begin()
        for number in range(self._count):
            self._stream.put_back(number, self._stream.take())
        self._stream.finish()


def quick_rate(folder: Path) -> tuple[float, bool]:
    """Bytes/s that a short update moves, both directions together, and whether that was direct I/O.

    Raises:
        EngineRefusalError: the folder cannot be written to, or has too little room.
    """
    passes = FilePass(folder, BUFFERS, QUICK_BYTES)
    try:
        began = time.perf_counter()
        passes.update()
        return 2 * passes.size / (time.perf_counter() - began), passes.file.direct
    finally:
        passes.file.close()
