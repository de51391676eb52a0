"""The output of a rank: read as it arrives, kept in part for the message about its end, forwarded to the trial's log.

This file imports only the standard library and files that do the same: Ray carries it by value to its workers with
`rank_process`.

This file imports only the standard library: Ray carries it by value to its workers with `rank_output`.
"""

import codecs
import collections
import json
import os
import select
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

TAIL_BYTES = 16_384
"""Bytes of the end of a rank's output that are kept in memory."""
FIRST_BYTES, LAST_BYTES = 65_536, 262_144
"""Bytes of the beginning and of the end that are forwarded of the output between two readings."""
_READS = 32
"""Most reads at once: a rank may print faster than the parent reads."""


class RankOutput:
    """Reads a rank's output, so that the rank never blocks on it; keeps its end, and forwards all of it in pieces."""

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: str | None) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._log_path = log_path
        self._log: BinaryIO | None = None
        self._kept = b""
        self._forgotten = 0
        self.length = 0
        """Total bytes printed so far."""
        self._pending: HeadAndTail[bytes] = HeadAndTail(FIRST_BYTES, LAST_BYTES)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._passed_at = 0.0
        self._lock = threading.Lock()
        """Protects the stream: a caller must see all earlier output, even what the thread has just read."""
        self._at_end = False
        os.set_blocking(self._stream.fileno(), False)
        self._thread = threading.Thread(target=self._follow, name="rank-output", daemon=True)
        self._thread.start()

    def tail(self, *, wait: bool) -> str:
        """Return the kept output. With `wait`, read the rest first: the process has ended, so all output is available."""
        if wait:
            with self._lock:  # the thread may lag behind on a busy machine
                self._read(_READS)
        return self.since(self._forgotten)

    def since(self, length: int) -> str:
        """Return the output after the first `length` bytes, as far as it is kept."""
        with self._lock:
            printed = min(self.length - length, TAIL_BYTES)
            return self._kept[-printed:].decode(errors="replace").strip() if printed > 0 else ""

    def forget(self) -> None:
        """Discard the output so far."""
        self._forgotten = self.length

    def messages(self, *, at_once: bool, ended: bool) -> list[bytes]:
        """Return the output since the last call, if that was long enough ago or it is requested `at_once`."""
        if ended:
            self._thread.join(0.5)
        # Output that is not followed by a message is forwarded four times a second.
        if not (at_once or ended) and time.monotonic() - self._passed_at < 0.25:
            return []
        self._passed_at = time.monotonic()
        with self._lock:
            self._read(_READS)
            pieces = self._pending.take()
        messages = [self._message(left_out, chunk) for left_out, chunk in pieces]
        return [json.dumps(message).encode() for message in messages if message["text"] or message["left_out"]]

    def close(self) -> None:
        """Stop reading; the process has ended."""
        self._thread.join(0.5)

    def _message(self, left_out: int, chunk: bytes) -> dict[str, object]:
        if left_out:
            self._decoder.reset()  # the other bytes of a split character may be in the dropped part
        return {"kind": "output", "text": self._decoder.decode(chunk), "left_out": left_out}

    def _follow(self) -> None:
        with self._stream as stream:
            poller = select.poll()
            poller.register(stream, select.POLLIN | select.POLLHUP)
            while not self._at_end:
                poller.poll()
                with self._lock:
                    self._read(1)
        if self._log is not None:
            self._log.close()

    def _read(self, most: int) -> None:
        """Read the available output, in at most `most` reads."""
        for _ in range(most):
            if self._at_end:
                return
            try:
                chunk = os.read(self._stream.fileno(), 65_536)
            except BlockingIOError:
                return
            self._at_end = not chunk
            if chunk:
                self._keep(chunk)

    def _keep(self, chunk: bytes) -> None:
        self._pending.add(chunk, len(chunk))
        self._kept = (self._kept + chunk)[-TAIL_BYTES:]
        self.length += len(chunk)
        if self._log_path is not None:
            self._log = _roll(self._log_path, self._log)
            self._log.write(chunk)


def _roll(path: str, log: BinaryIO | None) -> BinaryIO:
    """Return the open log file, after rotating one that is full (4 MiB); one old file is kept."""
    if log is not None and log.tell() < 4 * 2**20:
        return log
    if log is not None:
        log.close()
        Path(path).replace(f"{path}.1")
    # Readable only by its owner: scripts may print secrets.
    return open(path, "ab", buffering=0, opener=partial(os.open, mode=0o600))


T = TypeVar("T")


class HeadAndTail(Generic[T]):
    """A queue of pieces of a stream. If they arrive faster than they are taken, the middle is dropped and its size counted."""

    def __init__(self, head: int, tail: int) -> None:
        """
        Args:
            head: size up to which the first pieces are kept.
            tail: size of the latest further pieces that are kept.
        """
        self._head_size, self._tail_size = head, tail
        self._empty()

    def add(self, item: T, size: int) -> None:
        """Append a piece."""
        if self._kept < self._head_size:
            self._head.append((0, item))
            self._kept += size
            return
        self._tail.append((size, item))
        self._length += size
        while self._length > self._tail_size and len(self._tail) > 1:
            dropped, _ = self._tail.popleft()
            self._length -= dropped
            self._left_out += dropped

    def take(self) -> list[tuple[int, T]]:
        """Remove and return the pieces in order, each with the size of what was dropped just before it."""
        tail = [(0, item) for _, item in self._tail]
        if tail:
            tail[0] = (self._left_out, tail[0][1])
        pieces = [*self._head, *tail]
        self._empty()
        return pieces

    def _empty(self) -> None:
        self._head: list[tuple[int, T]] = []
        self._tail: collections.deque[tuple[int, T]] = collections.deque()
        self._kept = self._length = self._left_out = 0
