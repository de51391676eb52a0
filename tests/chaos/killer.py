"""Who is killed, and when."""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil

from tests.chaos.databases import ChaosDatabase
from tests.chaos.supervisor import Supervisor

LONG_OUTAGE_SECONDS = 33.0
"""Longer than anybody waits for a database that was there before."""

DRIVER_SECONDS = 20.0
"""Longest time from when a driver is seen to have Ray, or to start it, to its kill: half of that is the start."""


class Kind(StrEnum):
    """Kinds of processes that are killed."""

    SERVER = "API server"
    WORKER = "worker"
    DRIVER = "Ray driver"
    """A worker that has taken a job on Ray, and has started Ray for it."""
    DATABASE = "database"
    RANK = "rank under Ray"
    RAYLET = "raylet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill."""

    kind: Kind
    after: float
    """Seconds since the soak began."""
    what: str


def plan(chance: random.Random, kills: int, ray: bool) -> list[Kind]:
    """`kills` of servers, workers, drivers and databases alike, in any order; and a few of what runs below a driver."""
    kinds = [Kind.SERVER, Kind.DATABASE, Kind.WORKER, *([Kind.DRIVER] if ray else [])]
    planned = [kinds[number % len(kinds)] for number in range(kills)]
    planned += [Kind.RANK, Kind.RAYLET] * (max(1, kills // 15) if ray else 0)
    chance.shuffle(planned)
    return planned


@dataclass(slots=True, kw_only=True)
class Killer:
    """Kills by plan at random moments."""

    supervisor: Supervisor
    database: ChaosDatabase
    names: dict[Kind, list[str]]
    """Kind -> names of its processes at the supervisor."""
    chance: random.Random
    most_pause: float
    """Longest time from one kill to the next, in seconds."""
    long_outages: int = 0
    """Kills of the database after which it stays away longer than anybody waits for it."""
    kills: list[Kill] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def counts(self) -> Counter[Kind]:
        """Kills by kind."""
        return Counter(kill.kind for kill in self.kills)

    def kill(self, kind: Kind) -> None:
        """Wait for a random moment, and kill one of the kind."""
        time.sleep(self.chance.uniform(0.1, self.most_pause))
        verbs: dict[Kind, Callable[[], str]] = {
            Kind.DATABASE: self._kill_database,
            Kind.DRIVER: self._kill_driver,
            Kind.RANK: lambda: self._kill_below(Kind.DRIVER, "rank_main.py"),
            Kind.RAYLET: lambda: self._kill_below(Kind.DRIVER, "/raylet/raylet "),
        }
        what = verbs.get(kind, lambda: self._kill_named(kind))()
        self.kills.append(Kill(kind=kind, after=time.monotonic() - self._began, what=what))

    def _kill_named(self, kind: Kind) -> str:
        name = self.chance.choice(self.names[kind])
        self.supervisor.kill(name)
        return name

    def _kill_database(self) -> str:
        away = self.chance.uniform(0.0, 3.0)
        if self.long_outages:
            self.long_outages, away = self.long_outages - 1, LONG_OUTAGE_SECONDS
        return self.database.kill(self.supervisor, self.chance, away)

    def _kill_driver(self) -> str:
        """Kill it while Ray starts, while its ranks do, or while they run trials."""
        name = self.chance.choice(self.names[Kind.DRIVER])
        while True:
            self._find_below(Kind.DRIVER, "/gcs/gcs_server ")
            time.sleep(self.chance.uniform(0.0, DRIVER_SECONDS))
            pid = self.supervisor.pid(name)
            if any("/gcs/gcs_server " in _command(process) for process in _below(pid)):
                self.supervisor.kill(name)
                return f"{name}, {pid}"

    def _kill_below(self, kind: Kind, words: str) -> str:
        """Kill one of the processes below one of the kind."""
        while True:
            victim = self._find_below(kind, words)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                return f"{words.strip()} {victim}"

    def _find_below(self, kind: Kind, words: str) -> int:
        """Wait for a process with these words in its command line, below one of the kind."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            pid = self.supervisor.pid(self.chance.choice(self.names[kind]))
            if found := [process for process in _below(pid) if words in _command(process)]:
                return self.chance.choice(found)
            time.sleep(0.1)
        raise AssertionError(f"there never was a process {words!r}")


def _below(pid: int) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
