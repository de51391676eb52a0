"""A rank process as its parent holds it: a pipe of messages, the tail of its output, its end.

This file imports the standard library alone: the Ray actors carry it by value to workers where nothing of ours is importable.
"""

import collections
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

TAIL_BYTES = 16_384
"""How much of the end of a rank's output is kept in memory."""
LOG_BYTES = 4 * 1024 * 1024
"""Length at which a log file is set aside (one is) and a new one begun."""


class RankProcess:
    """One rank process. Used from one thread, but for `send` and `end`, which may be called from another.

    It ends when its parent ends, because the system kills it then: it is in a process group, not in a session, of its own,
    so that Ctrl-C in a terminal passes it by and `kill` reaches the processes that users' code has started too.
    """

    def __init__(
        self,
        rank_main: str,
        *,
        trial_function: str,
        python_path: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log_path: str | None = None,
    ) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=True)
        arguments = [str(theirs.fileno()), str(os.getpid()), trial_function, json.dumps(list(python_path))]
        # -P: the folder of rank_main, which has a `ray` of ours, must not be first on sys.path.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", rank_main, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            pass_fds=(theirs.fileno(),),
            process_group=0,
        )
        theirs.close()
        self.connection: Connection = ours
        """Readable when there is a message or the rank has ended."""
        self._output = _Output(self._process, log_path)

    def send(self, message: bytes) -> None:
        """Send a message; a rank that is gone is told of by `receive`."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def receive(self) -> list[bytes]:
        """The messages that are here, without waiting."""
        messages = []
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll(0):
                messages.append(self.connection.recv_bytes())
        return messages

    def wait(self, timeout: float) -> None:
        """Wait until there is a message, the rank has ended, or `timeout` seconds have passed."""
        with contextlib.suppress(OSError):
            self.connection.poll(timeout)

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        code = self._process.poll()
        if code is not None:
            self._kill_group()  # what users' code has started must not outlive the rank
        return code

    def tail(self) -> str:
        """The last lines of its output; complete once the rank has ended."""
        return self._output.tail(wait=self._process.poll() is not None)

    def end(self) -> None:
        """End it and all that it has started, and return when it is gone. Its last messages and output stay readable."""
        if self._process.poll() is None:
            self._kill_group()
        self._process.wait()

    def kill(self) -> None:
        """End it, and close what was open to it. May be called twice."""
        self.end()
        self._output.close()
        self.connection.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class _Output:
    """Reads what a rank prints, so that it never waits for a reader, and keeps a bounded part."""

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: str | None) -> None:
        self._process = process
        self._log_path = log_path
        self._chunks: collections.deque[bytes] = collections.deque()
        self._length = 0
        self._thread = threading.Thread(target=self._read, name="rank-output", daemon=True)
        self._thread.start()

    def tail(self, *, wait: bool) -> str:
        """The kept part; with `wait` only after the last byte has come."""
        if wait:
            self._thread.join(0.5)
        return b"".join(self._chunks.copy())[-TAIL_BYTES:].decode(errors="replace").strip()

    def close(self) -> None:
        """Stop reading; the process has ended."""
        self._thread.join(0.5)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream, contextlib.ExitStack() as stack:
            log = None
            while chunk := os.read(stream.fileno(), 65_536):
                self._keep(chunk)
                if self._log_path is not None:
                    log = _roll(self._log_path, log, stack)
                    log.write(chunk)

    def _keep(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._length += len(chunk)
        while self._length - len(self._chunks[0]) >= TAIL_BYTES:
            self._length -= len(self._chunks.popleft())


def _roll(path: str, log: BinaryIO | None, stack: contextlib.ExitStack) -> BinaryIO:
    """The open log file; a long one is set aside first."""
    if log is not None and log.tell() < LOG_BYTES:
        return log
    if log is not None:
        log.close()
        Path(path).replace(f"{path}.1")
    return stack.enter_context(Path(path).open("ab", buffering=0))
