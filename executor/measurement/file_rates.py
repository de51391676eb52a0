"""Measures a folder's file system with the engine's own way of reading and writing. Does not import torch."""

import mmap
import time
from pathlib import Path

from executor.files.rank_file import Extent, FileStream, RankFile
from search_spaces.training.states import BUFFERS

QUICK_BYTES = 16 << 20
"""Bytes of an extent in the quick measurement, which moves four of them in each direction."""


class FilePass:
    """A file with passes over it: the file traffic of an optimizer step, without the arithmetic."""

    def __init__(self, folder: Path, extents: int, extent_bytes: int) -> None:
        """Create the file and fill it once.

        Raises:
            EngineRefusalError: the folder is not writable, or has too little space.
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
        """Read every byte once into memory."""
        self._stream.begin()
        for _ in range(self._count):
            self._stream.give_back(self._stream.take())
        self._stream.finish()

    def update(self) -> None:
        """Read and write every byte once, both directions concurrently."""
        self._stream.begin()
        for number in range(self._count):
            self._stream.put_back(number, self._stream.take())
        self._stream.finish()


def quick_rate(folder: Path) -> tuple[float, bool]:
    """Return the bytes/s of a short update, both directions together, and whether it used direct I/O.

    Raises:
        EngineRefusalError: the folder is not writable, or has too little space.
    """
    passes = FilePass(folder, BUFFERS, QUICK_BYTES)
    try:
        began = time.perf_counter()
        passes.update()
        return 2 * passes.size / (time.perf_counter() - began), passes.file.direct
    finally:
        passes.file.close()
