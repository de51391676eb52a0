"""A rank's handle on the process of a user's script."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS = 30.0
"""Time limit for the supervisor, a Python without packages, to start the script."""
END_SECONDS = 10.0
"""Time limit for killed processes to end."""
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command to run and its surroundings."""

    words: tuple[str, ...]
    """Program and arguments."""
    environment: Mapping[str, str]
    folder: str
    """Working folder; empty: the rank's."""
    data_limit: int | None = None
    """Limit on the private memory of each of its processes [bytes]; None: no limit."""
    shared_memory: str = ""
    """Pattern of the shared-memory files that it may leave; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a script ended."""

    code: int
    """Exit code; negative: the signal that ended it."""
    peak_bytes: int = 0
    """Peak resident set of its own process."""
    problem: str = ""
    """Why the script could not be started; empty: it ran."""


class ScriptProcess:
    """One script under its supervisor (`supervisor.py`). Used from one thread.

    However this process ends, the script and all its child processes end with it.
    """

    def __init__(self, launch: Launch, folder: Path, output: Path) -> None:
        plan = folder / "launch.json"
        plan.write_text(
            json.dumps({
                "words": launch.words, "environment": dict(launch.environment), "folder": launch.folder,
                "data_limit": launch.data_limit, "output": str(output), "shared_memory": launch.shared_memory,
            }),
            encoding="utf-8",
        )  # fmt: skip
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("supervisor.py")), str(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        assert self._supervisor.stdout is not None
        os.set_blocking(self._supervisor.stdout.fileno(), False)
        self._received = b""
        self.exit: Exit | None = None
        """How the script ended; None: it was running at the last `poll`."""
        self.pid = 0
        """Process ID of the script's own process; 0: it could not be started."""
        self._wait_for(lambda: self.pid != 0, START_SECONDS)

    @property
    def supervisor_pid(self) -> int:
        """The process that all processes of the script descend from."""
        return self._supervisor.pid

    def poll(self) -> Exit | None:
        """How the script ended; None: it is running."""
        if self.exit is None:
            gone = self._supervisor.poll() is not None  # before reading its messages, so that the last ones are read
            self._read_messages()
            if self.exit is None and gone:
                self.exit = Exit(code=-9, problem="the supervisor of the script was killed")
        return self.exit

    def signal(self, letter: bytes) -> None:
        """Send a signal, by its letter in `supervisor.SIGNALS`. Ignored if the script has ended."""
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone, or was closed
            self._supervisor.stdin.write(letter)
            self._supervisor.stdin.flush()

    def end(self, grace: float) -> None:
        """Terminate the script, kill it after `grace` seconds; return when all its processes are gone. May be called twice."""
        if self.poll() is None and grace > 0:
            self.signal(b"t")
            self._wait_for(lambda: False, grace)
        if self.poll() is None:
            self.signal(b"k")
            self._wait_for(lambda: False, END_SECONDS)
        self._close()

    def _wait_for(self, condition: Any, seconds: float) -> None:
        """Wait until the condition holds, the script has ended or the time is over."""
        until = time.monotonic() + seconds
        while self.poll() is None and not condition() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _read_messages(self) -> None:
        assert self._supervisor.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._supervisor.stdout.fileno(), 65_536):
                self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            message = json.loads(line)
            self.pid = message.get("pid", self.pid)
            if "failed" in message:
                self.exit = Exit(code=127, problem=message["failed"])
            elif "exit" in message:
                self.exit = Exit(code=message["exit"], peak_bytes=message["peak_bytes"])

    def _close(self) -> None:
        for stream in (self._supervisor.stdin, self._supervisor.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()  # at the end of its input the supervisor kills all remaining processes
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(END_SECONDS)


def python_command(words: Sequence[str]) -> list[str]:
    """The command with the ranks' Python in place of `python`, and before a bare script, as torchrun does."""
    if words[0] in ("python", "python3"):
        return [sys.executable, *words[1:]]
    return [sys.executable, *words] if words[0].endswith(".py") else list(words)
