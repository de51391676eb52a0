"""What it means to kill the database."""

import fcntl
import os
import random
import signal
import struct
import time
from abc import ABC, abstractmethod
from pathlib import Path

from tests.chaos.supervisor import Supervisor
from tests.storage.postgres import PostgresServer

_LOCK = "hhqqi0q"
"""struct flock: type, whence, start, length, process."""
_WRITE_LOCK_BYTE = 120
"""Of the -shm file: whoever writes in WAL mode holds it (sqlite3, os_unix.c: UNIX_SHM_BASE; wal.c: WAL_WRITE_LOCK)."""


class ChaosDatabase(ABC):
    """A database that can be killed."""

    name: str
    address: str

    @abstractmethod
    def kill(self, supervisor: Supervisor, chance: random.Random, away: float) -> str:
        """Kill it, bring it back after `away` seconds where that is ours to do, and return what was hit."""


class ChaosPostgreSQL(ChaosDatabase):
    """A server: SIGKILL to all of its processes, then a start on what it left."""

    name = "PostgreSQL"

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.address = server.new_database()

    def kill(self, supervisor: Supervisor, chance: random.Random, away: float) -> str:
        del supervisor, chance
        self._server.kill()
        time.sleep(away)
        self._server.start()
        return f"server, away for {away:.1f} s"


class ChaosSqlite(ChaosDatabase):
    """A file has no server: the one who is killed is the process of ours that is inside its write transaction.

    The process of the test must not open the file meanwhile: closing it would drop locks, and hide who has them.
    """

    name = "SQLite"

    def __init__(self, path: Path) -> None:
        self.address = f"sqlite:///{path}"
        self._shared = Path(f"{path}-shm")

    def kill(self, supervisor: Supervisor, chance: random.Random, away: float) -> str:
        del away
        skipped = chance.randrange(20)
        until = time.monotonic() + 120
        while time.monotonic() < until:
            pid = self._writer()
            if pid is None:
                time.sleep(0.0002)
            elif skipped:  # else it were always the one who writes most
                skipped -= 1
                time.sleep(chance.uniform(0.0, 0.05))
            elif (name := supervisor.name_of(pid)) is not None and self._stopped_inside(pid):
                supervisor.kill(name)
                return f"{name}, inside its write transaction"
        raise AssertionError("nobody was found inside a write transaction")

    def _stopped_inside(self, pid: int) -> bool:
        """Stop the process, and see whether it holds the lock still: then it is inside its transaction, and stays there."""
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
            time.sleep(0.0005)
        if self._writer() == pid:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    def _writer(self) -> int | None:
        """The process that holds the write lock."""
        try:
            file = os.open(self._shared, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            asked = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, _WRITE_LOCK_BYTE, 1, 0)
            kind, _, _, _, pid = struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
        finally:
            os.close(file)
        return None if kind == fcntl.F_UNLCK else pid
