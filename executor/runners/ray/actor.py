"""What runs in a Ray worker: the parent of one rank process.

Ray's workers get this file by value, for there `executor` may be a package of the user's. So it imports the standard
library, Ray, and `rank_process`, which travels in the same way with what it imports, alone.

A rank is a child of the actor, not the actor itself, because:

- our code must be imported, and its names forgotten, before anything of the user's is; a Ray worker has started long before;
- a rank that hangs in a collective, crashes or leaks is killed and started anew without a new actor, placement, or worker;
- the actor's own threads keep answering while the rank is stuck in native code.
"""

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from executor.runners.rank_process import RankProcess, stacks_of

CONTROL = "control"
"""The concurrency group whose thread answers while `run_rank` runs."""
_SLICE_SECONDS = 0.1
"""How soon an end is seen where the pipe does not tell it, because a child of the rank holds it open."""
_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux."""


class RankActor:
    """Starts one rank process after the other and passes messages on. The other methods come on Ray's thread for `CONTROL`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._life = self._killed = 0
        self._rank: RankProcess | None = None

    def run_rank(
        self, life: int, rank_main: str, options: dict[str, Any], address: str, cores: tuple[int, ...] | None, sharing: int
    ) -> Iterator[bytes | tuple[int, str, bool]]:
        """Start a rank and yield its messages, then its exit code, the end of its output, and whether memory had run out.

        `address`: the node's; `cores`: those of the host's that are the rank's alone, else `sharing` ranks share all.
        """
        if not Path(rank_main).exists():
            raise FileNotFoundError(f"{rank_main} is not there; install the same version at the same place on every node")
        with self._lock:
            if self._killed >= life:  # `kill` overtook this call
                return
            with _bound_to(cores):
                variables = {**_variables(address, sharing), **options.pop("environment")}
                self._life = life
                rank = self._rank = RankProcess(rank_main, environment=variables, **options)
        exit_code = None
        while exit_code is None:
            rank.wait(_SLICE_SECONDS)
            exit_code = rank.exit_code()  # before its messages, so that a death is told after the last of them
            for message in rank.receive():  # noqa: UP028  Ray drives a generator by `send`, which a list has not
                yield message
        tail, out_of_memory = rank.tail(), rank.out_of_memory_kill()
        rank.kill()
        yield exit_code, tail, out_of_memory

    def send(self, message: bytes) -> None:
        """Pass a message to the rank."""
        if self._rank is not None:
            self._rank.send(message)

    def stacks(self, seconds: float) -> str:
        """Where the rank's threads stand, if it prints it within `seconds`; else nothing."""
        return stacks_of({0: self._rank}, seconds).get(0, "") if self._rank is not None else ""

    def kill(self, life: int) -> None:
        """End the ranks that were started up to `life`, also where the start has not come yet. Returns when they are gone."""
        with self._lock:
            self._killed = life
            if self._rank is not None and self._life <= life:  # a later one is not meant
                self._rank.end()  # `run_rank` sees it and cleans up


@contextlib.contextmanager
def _bound_to(cores: tuple[int, ...] | None) -> Iterator[None]:
    """Bind this thread to these of the cores that it may use, by their place among them: what it starts inherits that."""
    if cores is None:
        yield
        return
    usable = sorted(os.sched_getaffinity(0))
    if cores[-1] >= len(usable):
        told = f"Ray has given more ranks than the {len(usable)} cores that can be used here"
        raise ValueError(f"{told}; start this node's Ray with --num-cpus {len(usable)}")
    os.sched_setaffinity(0, {usable[core] for core in cores})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def _variables(address: str, sharing: int) -> Mapping[str, str]:
    """Threads by the share of cores, for those in excess only take turns; and the interface that the other ranks reach.

    Without an interface gloo looks up the host's name, which not every network answers, or which means the wrong one.
    """
    own = len(os.sched_getaffinity(0))
    threads = {"OMP_NUM_THREADS": str(max(1, own // sharing))}
    interface = None if "GLOO_SOCKET_IFNAME" in os.environ else _interface_of(address)
    return threads if interface is None else {**threads, "GLOO_SOCKET_IFNAME": interface}


def _interface_of(address: str) -> str | None:
    """The interface that has this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
