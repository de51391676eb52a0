"""The actor that runs in a Ray worker: the parent of one rank process.

Ray's workers get this file by value, because there `executor` may be a package of the user. So it imports only the standard
library, Ray, and `rank_process`, which is passed by value in the same way, with its own imports.

A rank is a child of the actor, not the actor itself, because:

- our code must be imported, and its names removed, before any module of the user; a Ray worker has started long before;
- a rank that hangs in a collective, crashes or leaks is killed and restarted without a new actor, placement or worker;
- the actor's own threads keep answering while the rank is blocked in native code.
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


class RankActor:
    """Runs one rank process after another and forwards messages. All methods but `run_rank` run on the `CONTROL` thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = self._killed = 0
        self._rank: RankProcess | None = None

    def run_rank(
        self,
        generation: int,
        rank_main: str,
        options: dict[str, Any],
        address: str,
        cores: tuple[int, ...] | None,
        sharing: int,
    ) -> Iterator[bytes | tuple[int, str, bool]]:
        """Start a rank and yield its messages, then (exit code, end of its output, whether the kernel killed for memory).

        `address`: of the node; `cores`: the rank's exclusive cores of the host; None: `sharing` ranks share all cores.
        """
        if not Path(rank_main).exists():
            raise FileNotFoundError(f"{rank_main} is not there; install the same version at the same place on every node")
        with self._lock:
            if self._killed >= generation:  # `kill` overtook this call
                return
            with _bound_to(cores):
                variables = {**_variables(address, sharing), **options.pop("environment")}
                self._generation = generation
                rank = self._rank = RankProcess(rank_main, environment=variables, **options)
        exit_code = None
        while exit_code is None:
            # Longest delay until the end of a rank is noticed if a child of the rank keeps the pipe open.
            rank.wait(0.1)
            exit_code = rank.exit_code()  # read before the messages, so that a death is reported after the last of them
            for message in rank.receive():  # noqa: UP028  Ray drives a generator by `send`, which a list does not have
                yield message
        tail, out_of_memory = rank.tail(), rank.out_of_memory_kill()
        rank.kill()
        yield exit_code, tail, out_of_memory

    def send(self, message: bytes) -> None:
        """Forward a message to the rank."""
        if self._rank is not None:
            self._rank.send(message)

    def stacks(self, seconds: float) -> str:
        """Return the rank's thread stacks if it prints them within `seconds`, else an empty string."""
        return stacks_of({0: self._rank}, seconds).get(0, "") if self._rank is not None else ""

    def kill(self, generation: int) -> None:
        """End the ranks up to `generation`, even if their start has not arrived yet. Returns when they are gone."""
        with self._lock:
            self._killed = generation
            if self._rank is not None and self._generation <= generation:  # a later rank is not affected
                self._rank.end()  # `run_rank` sees it and cleans up


@contextlib.contextmanager
def _bound_to(cores: tuple[int, ...] | None) -> Iterator[None]:
    """Bind this thread to some of its usable cores, given by index. Processes started inside the block inherit the binding."""
    if cores is None:
        yield
        return
    usable = sorted(os.sched_getaffinity(0))
    if cores[-1] >= len(usable):
        problem = f"Ray has placed more ranks than the {len(usable)} cores that can be used here"
        raise ValueError(f"{problem}; start this node's Ray with --num-cpus {len(usable)}")
    os.sched_setaffinity(0, {usable[core] for core in cores})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def _variables(address: str, sharing: int) -> Mapping[str, str]:
    """Return the number of threads, limited to the rank's share of the cores, and the interface that the other ranks can reach.

    Without an interface gloo resolves the host's name, which may fail or give the wrong interface, and NCCL takes the first
    ones that it finds, such as a container's bridge. NCCL takes names for prefixes unless they begin with `=`.
    """
    cores = len(os.sched_getaffinity(0))
    variables = {"OMP_NUM_THREADS": str(max(1, cores // sharing))}
    if (interface := _interface_of(address)) is not None:
        named = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        variables |= {name: value for name, value in named.items() if name not in os.environ}
    return variables


def _interface_of(address: str) -> str | None:
    """Return the interface with this IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # Linux's SIOCGIFADDR.
                answer = fcntl.ioctl(udp_socket.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
