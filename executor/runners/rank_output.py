"""What a rank prints: read as it comes, kept for the message of its end, passed on for the log of its trial.

This file imports the standard library alone, and what does so too: it travels to Ray's workers with `rank_process`.
"""

import codecs
import json
import os
import select
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import BinaryIO

from executor.runners.head_and_tail import HeadAndTail

TAIL_BYTES = 16_384
"""How much of the end of a rank's output is kept in memory."""
LOG_BYTES = 4 * 1024 * 1024
"""Length at which a log file is set aside (one is) and a new one begun."""
FIRST_BYTES, LAST_BYTES = 65_536, 262_144
"""How much of the beginning and of the end is passed on of what a rank prints between two looks."""
PASS_SECONDS = 0.25
"""How often output is passed on that no message follows."""
_READ_BYTES = 65_536
_READS = 32
"""Reads for which a look waits at most: a rank may print faster than anybody reads."""


class RankOutput:
    """Reads what a rank prints, so that it never waits for a reader; keeps the end of it, and passes all of it on in pieces."""

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: str | None) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._log_path = log_path
        self._log: BinaryIO | None = None
        self._kept = b""
        self._forgotten = 0
        self.length = 0
        """Bytes that it has printed in all."""
        self._pending: HeadAndTail[bytes] = HeadAndTail(FIRST_BYTES, LAST_BYTES)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._passed_at = 0.0
        self._lock = threading.Lock()
        """Of the stream: whoever looks must find all that was printed before, also what the thread has just taken out."""
        self._at_end = False
        os.set_blocking(self._stream.fileno(), False)
        self._thread = threading.Thread(target=self._follow, name="rank-output", daemon=True)
        self._thread.start()

    def tail(self, *, wait: bool) -> str:
        """The kept part; with `wait` only after the last byte has come: the process has ended, so that all of it is there."""
        if wait:
            with self._lock:  # the thread may come late on a busy machine
                self._read(_READS)
        return self.since(self._forgotten)

    def since(self, length: int) -> str:
        """What was printed after so many bytes, as far as it is kept."""
        with self._lock:
            printed = min(self.length - length, TAIL_BYTES)
            return self._kept[-printed:].decode(errors="replace").strip() if printed > 0 else ""

    def forget(self) -> None:
        """Keep nothing of what was printed so far."""
        self._forgotten = self.length

    def messages(self, *, at_once: bool, ended: bool) -> list[bytes]:
        """What was printed since the last time, where that is long enough ago or wanted `at_once`."""
        if ended:
            self._thread.join(0.5)
        if not (at_once or ended) and time.monotonic() - self._passed_at < PASS_SECONDS:
            return []
        self._passed_at = time.monotonic()
        with self._lock:
            self._read(_READS)
            pieces = self._pending.take()
        told = [self._message(left_out, chunk) for left_out, chunk in pieces]
        return [json.dumps(message).encode() for message in told if message["text"] or message["left_out"]]

    def close(self) -> None:
        """Stop reading; the process has ended."""
        self._thread.join(0.5)

    def _message(self, left_out: int, chunk: bytes) -> dict[str, object]:
        if left_out:
            self._decoder.reset()  # the other half of a character is among what was left out
        return {"kind": "output", "text": self._decoder.decode(chunk), "left_out": left_out}

    def _follow(self) -> None:
        with self._stream as stream:
            something = select.poll()
            something.register(stream, select.POLLIN | select.POLLHUP)
            while not self._at_end:
                something.poll()
                with self._lock:
                    self._read(1)
        if self._log is not None:
            self._log.close()

    def _read(self, most: int) -> None:
        """Take out of the stream what is there, in up to so many reads."""
        for _ in range(most):
            if self._at_end:
                return
            try:
                chunk = os.read(self._stream.fileno(), _READ_BYTES)
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
    """The open log file; a long one is set aside first."""
    if log is not None and log.tell() < LOG_BYTES:
        return log
    if log is not None:
        log.close()
        Path(path).replace(f"{path}.1")
    # Its owner's alone: scripts print what they know.
    return open(path, "ab", buffering=0, opener=partial(os.open, mode=0o600))
