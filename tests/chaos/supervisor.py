"""Keeps processes running as a service manager does: what ends is started again."""

import os
import random
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.leftovers import MARK

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from autotune.cli import main; sys.exit(main())"
SHUTDOWN_SECONDS = 60.0
START_SECONDS = 15.0
"""Time until a process answers signals in its own way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A process that ended by itself."""

    name: str
    status: int
    seconds: float
    """How long it ran."""
    last_line: str
    """Of what it wrote."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    name: str
    words: tuple[str, ...]
    process: "subprocess.Popen[bytes]"
    began: float
    killed: bool = False
    starts: int = 1


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """`autotune` commands by name. A killed one comes back after a moment; one that ends by itself too, and is noted."""

    folder: Path
    variables: Mapping[str, str]
    chance: random.Random
    most_pause: float = 1.0
    """Longest time until what ended is started again, in seconds."""
    exits: list[Exit] = field(default_factory=list)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _watcher: threading.Thread | None = None

    def keep(self, name: str, *words: str) -> None:
        """Start a command, and keep it running."""
        self._kept[name] = _Kept(name=name, words=words, process=self._start(name, words), began=time.monotonic())

    def watch(self) -> None:
        """Begin to look after them."""
        self._watcher = threading.Thread(target=self._watch, name="supervisor")
        self._watcher.start()

    def pid(self, name: str) -> int:
        """The process that has this name now, which may have ended."""
        return self._kept[name].process.pid

    def kill(self, name: str) -> None:
        """SIGKILL; returns when it is gone. One that was just killed is waited for until it is there again."""
        kept = self._kept[name]
        while True:
            with self._lock:
                if kept.process.poll() is None:
                    kept.killed = True
                    kept.process.kill()
                    kept.process.wait()
                    return
            time.sleep(0.02)

    def name_of(self, pid: int) -> str | None:
        """Which one a process is."""
        return next((name for name, kept in self._kept.items() if kept.process.pid == pid), None)

    def restarts(self) -> int:
        """How often something was started again."""
        return sum(kept.starts - 1 for kept in self._kept.values())

    def log(self, name: str) -> Path:
        """What it wrote, over all its lives."""
        return self.folder / f"{name}.log"

    def close(self) -> dict[str, int]:
        """SIGTERM to all; return how those ended that were not just about to start."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join()
        for kept in self._kept.values():
            kept.process.terminate()
        now = time.monotonic()
        statuses = {name: self._wait(kept) for name, kept in self._kept.items()}
        return {name: status for name, status in statuses.items() if now - self._kept[name].began > START_SECONDS}

    def _start(self, name: str, words: tuple[str, ...]) -> "subprocess.Popen[bytes]":
        environment = {**os.environ, **self.variables, "PYTHONPATH": str(ROOT), MARK: self.mark}
        with self.log(name).open("ab") as log:
            command = [sys.executable, "-c", MAIN, *words]
            return subprocess.Popen(command, env=environment, cwd=self.folder, stdout=log, stderr=log, process_group=0)

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            for kept in self._kept.values():
                with self._lock:
                    ended = kept.process.poll() is not None
                if ended and not self._ended.wait(self.chance.uniform(0.0, self.most_pause)):
                    self._start_again(kept)

    def _start_again(self, kept: _Kept) -> None:
        if not kept.killed:
            self.exits.append(self._exit(kept))
        with self._lock:
            kept.process, kept.began = self._start(kept.name, kept.words), time.monotonic()
            kept.killed, kept.starts = False, kept.starts + 1

    def _exit(self, kept: _Kept) -> Exit:
        lines = self.log(kept.name).read_text(errors="replace").strip().splitlines() or [""]
        seconds = time.monotonic() - kept.began
        return Exit(name=kept.name, status=kept.process.returncode, seconds=seconds, last_line=lines[-1])

    def _wait(self, kept: _Kept) -> int:
        try:
            return kept.process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            # Its stacks, where it has a handler for that, are in its log.
            kept.process.send_signal(signal.SIGABRT)
            return kept.process.wait()
