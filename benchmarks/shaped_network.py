"""Any number of hosts, each a network namespace of its own with a rank or several, on one switch whose ports have a given rate.

Linux, root, `ip` and `tc` are needed; `why_not` of `shaped_link` says what is missing.
"""

import contextlib
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Self

from benchmarks.shaped_link import INTERFACE, NAMESPACES, PREFIX, entered, remove_orphans, run_command
from executor.runners.gang import Gang
from executor.runners.gang_runner import GangRunner
from executor.runners.local import LocalTransport
from executor.runners.rank_process import RankProcess


@dataclass
class ShapedNetwork:
    """A context: inside it a namespace for each host and the switch between them exist, after it they do not."""

    ranks: int
    """Hosts: a rank each, unless the runner puts more there."""
    rate: str
    """As `tc` writes it: 500mbit. What a host sends and what it receives are each bounded by it."""
    burst: str = "256kb"
    names: tuple[str, ...] = field(init=False)
    """Of the namespaces: the ranks' in order, and the switch's last."""

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
        """No clash is possible: the namespaces are reachable from nowhere else."""
        return f"10.77.1.{rank + 1}"

    def command(self, rank: int) -> list[str]:
        """What to put before a command so that it runs where the rank runs."""
        return ["ip", "netns", "exec", self.names[rank]]

    def entered(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """This thread, and what it starts, is where the rank runs."""
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
        """Links go with their namespaces."""
        for name in self.names:
            if (NAMESPACES / name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


class NetworkRunner(GangRunner):
    """The local runner, each rank in its place of the network: so many of them, one after the other, on each host."""

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
