"""A Ray cluster of several nodes on this machine, in a process of its own: nodes are killed and added from outside.

`RayNodes` is the handle. The program reads a word a line and answers each with a line: `kill NAME`, `add`; it ends when its
input does.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

DEVICES = 8
"""Fake GPUs, and CPU slots, of a node."""
ROOT = Path(__file__).parents[2]
WORKERS = {
    # Ranks compute beside other processes of the tests, as those of a Ray that Autotune starts can.
    "RAY_worker_niceness": "0",
    # Each node would start as many idle workers as it has CPUs, for tasks that never come.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
"""Settings of a Ray for tests: few workers, which have time to compute."""
SETTINGS = {
    **WORKERS,
    "RAY_USAGE_STATS_ENABLED": "0",
    # Five answers missed, three seconds apart, are a node's death otherwise. One that stalls has 15 seconds here too.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_timeout_ms": "5000",
    # Nothing is left to be drained when the cluster ends.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}


class RayNodes:
    """The cluster's process. `nodes` of `DEVICES` fake GPUs each, beside a head that has none."""

    def __init__(self, nodes: int, variables: dict[str, str]) -> None:
        environment = {**os.environ, **SETTINGS, **variables, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.ray_nodes", str(nodes)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = self._answer()
        self.names = [f"node-{number}" for number in range(nodes)]

    def kill(self, name: str) -> None:
        """End a node at once, as a power cut does."""
        self._ask(f"kill {name}")
        self.names.remove(name)

    def add(self) -> str:
        """Start a node; return its name."""
        self.names.append(self._ask("add"))
        return self.names[-1]

    def close(self) -> None:
        """End the cluster."""
        if self._process.poll() is None:
            self._process.communicate(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, words: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the cluster's process ended"
        return line


def main() -> None:
    """Serve the handle."""
    from ray.cluster_utils import Cluster

    def answer(line: str) -> None:
        print(line, flush=True)  # noqa: T201  the handle reads it

    head = {"num_cpus": 0, "num_gpus": 0, "node_name": "head", "include_dashboard": False, "object_store_memory": 10**8}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {}

    def add(name: str) -> None:
        own = {"num_cpus": DEVICES, "num_gpus": DEVICES, "resources": {name: 1}}
        nodes[name] = cluster.add_node(**own, node_name=name, object_store_memory=10**8)

    for number in range(int(sys.argv[1])):
        add(f"node-{number}")
    number = len(nodes)
    answer(cluster.address)
    for line in sys.stdin:
        verb, _, name = line.strip().partition(" ")
        if verb == "kill":
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        else:
            name, number = f"node-{number}", number + 1
            add(name)
        answer(name)
    cluster.shutdown()


if __name__ == "__main__":
    main()
