"""A file of one rank: asynchronous reads and writes past the page cache, streams of records, and the rates of a folder."""

import errno
import fcntl
import mmap
import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from executor.errors import EngineRefusalError
from search_spaces.training.states import BUFFERS, REQUEST_BYTES, REQUEST_THREADS
from search_spaces.trial import Workload

ALIGNMENT = 4096
"""Alignment of offsets, sizes and addresses for direct I/O [bytes]; sufficient on every file system that we know of."""


class Transfer:
    """An asynchronous transfer between a file and memory. Its requests keep a reference to the memory until they have ended."""

    def __init__(self, requests: list[Future[None]]) -> None:
        self._requests = requests

    def wait(self) -> None:
        """Return when the transfer is complete.

        Raises:
            OSError: a request failed.
        """
        for request in self._requests:
            request.result()


class RankFile:
    """An unnamed file of `size` bytes in a folder: however its process ends, the kernel frees it.

    All bytes are reserved on creation, so that a file system which is too small fails before the first step. If direct I/O
    is refused, pages are written out and dropped after each use: reads still come from the device, and host memory stays
    free.
    """

    def __init__(self, folder: Path, size: int) -> None:
        """Create the file and reserve its space.

        Raises:
            EngineRefusalError: the folder is missing, is not writable or has less than `size` bytes left.
        """
        self.size = max(rounded_up(size), ALIGNMENT)
        self.bytes_read = self.bytes_written = 0
        descriptor = _open_unnamed(folder)
        self._pool = ThreadPoolExecutor(REQUEST_THREADS, thread_name_prefix="nvme")
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, _close, self._pool, descriptor)
        _reserve(descriptor, self.size, folder)
        self.direct = _make_direct(descriptor)

    def read(self, offset: int, memory: memoryview) -> Transfer:
        """Fill `memory` from byte `offset` on; the offset and the length of `memory` are multiples of `ALIGNMENT`."""
        self.bytes_read += len(memory)
        return self._start(_read, offset, memory)

    def write(self, offset: int, memory: memoryview) -> Transfer:
        """Write `memory` to byte `offset`. The memory must not be changed before the transfer has ended."""
        self.bytes_written += len(memory)
        return self._start(_write, offset, memory)

    def close(self) -> None:
        """Wait for the running requests and free the file."""
        self._finalizer()

    def _start(self, operation: Callable[[int, int, memoryview, bool], None], offset: int, memory: memoryview) -> Transfer:
        starts = range(0, len(memory), REQUEST_BYTES)
        parts = ((offset + start, memory[start : start + REQUEST_BYTES]) for start in starts)
        return Transfer([self._pool.submit(operation, self._descriptor, *part, self.direct) for part in parts])


def folder_of(workload: Workload) -> Path:
    """The folder of the rank files of a trial.

    Raises:
        EngineRefusalError: the job sets no `nvme_path`.
    """
    if workload.nvme_path is None:
        raise EngineRefusalError("nvme-path", "states go to files, but no folder is named for them; name one with --nvme-path")
    return Path(workload.nvme_path)


def rounded_up(size: int, to: int = ALIGNMENT) -> int:
    """Round `size` up to a multiple of `to`."""
    return -(-size // to) * to


def _open_unnamed(folder: Path) -> int:
    try:
        if hasattr(os, "O_TMPFILE"):
            try:
                return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                    raise
        descriptor, name = tempfile.mkstemp(prefix="autotune-", dir=folder)
        Path(name).unlink()
        return descriptor
    except OSError as error:
        problem = f"nvme_path {folder} cannot be written to ({os.strerror(error.errno or 0)})"
        raise EngineRefusalError("nvme-path", f"{problem}; name a folder that every node has, with --nvme-path") from error


def _reserve(descriptor: int, size: int, folder: Path) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        problem = f"a rank needs {size:,} bytes in files on {folder}, which has {free:,} left"
        raise EngineRefusalError("nvme-space", f"{problem}; free some, or name another folder with --nvme-path") from error


def _make_direct(descriptor: int) -> bool:
    """Switch the file to direct I/O if one block can be written and read that way; return whether it was switched."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    block = memoryview(mmap.mmap(-1, ALIGNMENT))
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(descriptor, [block], 0)
        os.preadv(descriptor, [block], 0)
    except OSError:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return False
    return True


def _read(descriptor: int, offset: int, view: memoryview, direct: bool) -> None:
    _move(lambda buffer, position: os.preadv(descriptor, [buffer], position), offset, view)
    if not direct:
        os.posix_fadvise(descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)


def _write(descriptor: int, offset: int, view: memoryview, direct: bool) -> None:
    _move(lambda buffer, position: os.pwritev(descriptor, [buffer], position), offset, view)
    if not direct:
        os.fdatasync(descriptor)  # dirty pages cannot be dropped
        os.posix_fadvise(descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)


def _move(move: Callable[[memoryview, int], int], offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        moved = move(view[done:], offset + done)
        if not moved:
            raise OSError(errno.EIO, f"the file of the offloaded states ends before byte {offset + len(view):,}")
        done += moved


def _close(pool: ThreadPoolExecutor, descriptor: int) -> None:
    pool.shutdown(wait=True, cancel_futures=True)
    os.close(descriptor)


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
        # Number of reads in flight when a record is first used.
        while len(self._reading) < 2 and self._next < len(self._extents) and (self._free or self._writing):
            extent, buffer = self._extents[self._next], self.fresh()
            self._reading.append((self.file.read(extent.offset, buffer[: extent.size]), buffer))
            self._next += 1

    def _reclaim(self) -> None:
        transfer, buffer = self._writing.popleft()
        transfer.wait()
        self._free.append(buffer)


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
