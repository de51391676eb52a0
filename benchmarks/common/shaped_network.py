"""Any number of hosts, each a network namespace with one or more ranks, on one switch whose ports have a given rate.

It needs Linux, root, `ip` and `tc`; `why_not` of `shaped_link` returns what is missing.
"""

import contextlib
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Self

from benchmarks.common.shaped_link import INTERFACE, NAMESPACES, PREFIX, entered, remove_orphans, run_command
from executor.runners.gang import Gang
from executor.runners.gang_runner import GangRunner
from executor.runners.local import LocalTransport
from executor.runners.rank_process import RankProcess


@dataclass
class ShapedNetwork:
    """A context manager: a namespace for each host and the switch between them exist inside the context."""

    ranks: int
    """Number of hosts, with one rank each unless the runner starts more."""
    rate: str
    """Rate of each host, separately for sending and receiving, as `tc` writes it: 500mbit."""
    burst: str = "256kb"
    names: tuple[str, ...] = field(init=False)
    """Names of the namespaces: the ranks' in order, then the switch's."""

    def __enter__(self) -> Self:
        remove_orphans()
        mark = f"{PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.names = tuple(f"{mark}-{place}" for place in (*range(self.ranks), "switch"))
        try:
            self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._remove()

    @staticmethod
    def address(rank: int) -> str:
        """Address of a rank; it cannot clash, since the namespaces are not reachable from outside."""
        return f"10.77.1.{rank + 1}"

    def command(self, rank: int) -> list[str]:
        """Prefix that makes a command run in the rank's namespace."""
        return ["ip", "netns", "exec", self.names[rank]]

    def entered(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Move this thread, and the processes it starts, into the rank's namespace."""
        return entered(self.names[rank])

    def _create(self) -> None:
        *ends, switch = self.names
        for name in self.names:
            run_command("ip", "netns", "add", name)
            run_command("ip", "-n", name, "link", "set", "lo", "up")
        run_command("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run_command("ip", "-n", switch, "link", "set", "bridge", "up")
        for rank, name in enumerate(ends):
            port = f"port{rank}"
            run_command("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
            run_command("ip", "-n", name, "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE)
            run_command("ip", "-n", switch, "link", "set", port, "master", "bridge")
            for space, device in ((name, INTERFACE), (switch, port)):
                shape = ("tbf", "rate", self.rate, "burst", self.burst, "latency", "50ms")
                run_command("tc", "-n", space, "qdisc", "add", "dev", device, "root", *shape)
                run_command("ip", "-n", space, "link", "set", device, "up")

    def _remove(self) -> None:
        """Deleting the namespaces also removes the links."""
        for name in self.names:
            if (NAMESPACES / name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


class NetworkRunner(GangRunner):
    """The local runner with each rank in its host's namespace: `ranks_of_host` consecutive ranks on each host."""

    def __init__(
        self, network: ShapedNetwork, ranks_of_host: int = 1, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        transport = _NetworkTransport(network, ranks_of_host, environment)
        super().__init__(transport, Gang(transport, device="cpu"))


class _NetworkTransport(LocalTransport):
    def __init__(self, network: ShapedNetwork, ranks_of_host: int, environment: Mapping[str, str]) -> None:
        super().__init__(network.ranks * ranks_of_host, environment={"GLOO_SOCKET_IFNAME": INTERFACE, **environment})
        self._network, self._ranks_of_host = network, ranks_of_host
        self.address = network.address(0)

    def _start_rank(self, rank: int, python_path: Sequence[str], variables: Mapping[str, str]) -> RankProcess:
        with self._network.entered(rank // self._ranks_of_host):
            return super()._start_rank(rank, python_path, variables)
