"""What runs in a Ray worker: the parent of one rank process.

Ray's workers get this file by value, for there `executor` may be a package of the user's. So it imports the standard
library, Ray, and `rank_process`, which travels in the same way, alone.

A rank is a child of the actor, not the actor itself, because:

- our code must be imported, and its names forgotten, before anything of the user's is; a Ray worker has started long before;
- a rank that hangs in a collective, crashes or leaks is killed and started anew without a new actor, placement, or worker;
- the actor's own threads keep answering while the rank is stuck in native code.
"""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from executor.runners.rank_process import RankProcess

CONTROL = "control"
"""The concurrency group whose thread answers while `run_rank` runs."""
_SLICE_SECONDS = 0.1
"""How soon an end is seen where the pipe does not tell it, because a child of the rank holds it open."""


class RankActor:
    """Starts one rank process after the other and passes messages on. `send` and `kill` come on Ray's thread for `CONTROL`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._killed = 0
        self._rank: RankProcess | None = None

    def describe(self) -> dict[str, Any]:
        """Where the actor is."""
        address = ray.util.get_node_ip_address()
        return {"host": socket.gethostname(), "address": address, "cores": len(os.sched_getaffinity(0))}

    def run_rank(self, life: int, rank_main: str, options: dict[str, Any]) -> Iterator[bytes | tuple[int, str]]:
        """Start a rank and yield its messages, then its exit code and the end of its output."""
        if not Path(rank_main).exists():
            yield 1, f"{rank_main} is not on {socket.gethostname()}; install the same version at the same place on every node"
            return
        with self._lock:
            if self._killed >= life:  # `kill` overtook this call
                return
            rank = self._rank = RankProcess(rank_main, **options)
        exit_code = None
        while exit_code is None:
            rank.wait(_SLICE_SECONDS)
            exit_code = rank.exit_code()  # before its messages, so that a death is told after the last of them
            for message in rank.receive():  # noqa: UP028  Ray drives a generator by `send`, which a list has not
                yield message
        tail = rank.tail()
        rank.kill()
        yield exit_code, tail

    def send(self, message: bytes) -> None:
        """Pass a message to the rank."""
        if self._rank is not None:
            self._rank.send(message)

    def kill(self, life: int) -> None:
        """End the ranks that were started up to `life`, also where the start has not come yet. Returns when they are gone."""
        with self._lock:
            self._killed = life
            if self._rank is not None:
                self._rank.end()  # `run_rank` sees it and cleans up
