"""The nodes of a Ray cluster: tracked by stable names, and described with their devices, cores and fused kernels."""

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from executor.errors import RunnerError
from executor.runners.ray import on_node
from executor.runners.ray.cluster import RayCluster
from search_spaces.clusters.cluster import ClusterSpec, DeviceSpec
from search_spaces.clusters.devices import device_preset, devices_named, link_of_gpus
from search_spaces.clusters.presets import CPU_MEMORY_BANDWIDTH, CPU_PEAK_FLOPS_PER_CORE
from search_spaces.kernels import PACKAGES
from search_spaces.trial import NodeEvent

RETRY_SECONDS = 5.0
"""How often a node that did not answer is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """A node as Ray reports it."""

    name: str
    """The name that trials and the quarantine use: Ray's node name, or its address if it has no name; with some digits of its
    ID if several live nodes share a name."""
    node_id: str
    """Ray's ID. A node that is restarted gets a new one."""
    address: str
    """The address at which Ray reaches it and its ranks listen."""
    host: str
    """The machine's name: fake nodes on one machine share it, and its cores."""
    alive: bool
    resources: Mapping[str, float] = field(default_factory=dict)
    """Ray's names -> amounts; memory in bytes. Empty if the node is lost."""
    why_gone: str = ""

    @property
    def accelerator(self) -> str:
        """Ray's name of its accelerators, such as H100; empty: it has none, or Ray does not recognise them."""
        return _name(self.resources)


class NodeTracker:
    """Tracks the live nodes, and reports which have joined and which were lost.

    Ray takes many seconds to declare a node dead. If an actor on a node is out of reach, the node is contacted directly: if Ray
    does not answer there, it is lost until it answers again.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._silent: dict[str, float] = {}
        self._ports: dict[str, int] = {}
        """Node ID -> the port on which Ray itself listens."""
        self.nodes: dict[str, RayNode] = {}
        """The live nodes by name."""
        self.refresh()

    def refresh(self) -> list[NodeEvent]:
        """Query Ray and return the changes since the last time."""
        self._refreshed_at = time.monotonic()
        alive = [row for row in ray.nodes() if row["Alive"]]
        self._retry_silent(alive)
        rows = [row for row in alive if row["NodeID"] not in self._silent]
        self._name(rows)
        self._ports = {row["NodeID"]: row["NodeManagerPort"] for row in rows}
        now = {self._names[row["NodeID"]]: _ray_node(self._names[row["NodeID"]], row) for row in rows}
        # A node that was restarted between two queries is both lost and added.
        gone = [name for name, node in self.nodes.items() if name not in now or now[name].node_id != node.node_id]
        added = [name for name in now if name not in self.nodes or name in gone]
        self.nodes = {name: now[name] for name in sorted(now)}
        lost = [NodeEvent(node=name, kind="lost", message="Ray has lost the node") for name in gone]
        return [*lost, *(NodeEvent(node=name, kind="added", message="the node has joined Ray") for name in added)]

    def refresh_if_due(self) -> list[NodeEvent]:
        """Call `refresh` at most once a second."""
        # How often Ray is asked which nodes are alive.
        return self.refresh() if time.monotonic() - self._refreshed_at >= 1.0 else []

    def check(self, name: str) -> list[NodeEvent]:
        """Contact a node on which an actor is out of reach; return the resulting events."""
        node = self.nodes.get(name)
        if node is None or _answers(node.address, self._ports[node.node_id]):
            return []
        self._silent[node.node_id] = time.monotonic()
        return self.refresh()

    def _retry_silent(self, alive: list[dict[str, Any]]) -> None:
        """Clear the silent mark of nodes that answer again, and of nodes that Ray has declared dead."""
        rows = {row["NodeID"]: row for row in alive if row["NodeID"] in self._silent}
        self._silent = {node_id: since for node_id, since in self._silent.items() if node_id in rows}
        for node_id, since in list(self._silent.items()):
            if time.monotonic() - since < RETRY_SECONDS:
                continue
            self._silent[node_id] = time.monotonic()
            if _answers(rows[node_id]["NodeManagerAddress"], rows[node_id]["NodeManagerPort"]):
                del self._silent[node_id]

    def _name(self, rows: list[dict[str, Any]]) -> None:
        """Name the nodes that have no name yet. A node keeps its name."""
        alike = Counter(own_name(row) for row in rows)
        used_names = {self._names[row["NodeID"]] for row in rows if row["NodeID"] in self._names}
        for row in rows:
            name = own_name(row)
            self._names.setdefault(row["NodeID"], node_name(row, shared=alike[name] > 1 or name in used_names))


def own_name(row: Mapping[str, Any]) -> str:
    """Return the node's name in a row of Ray's own table, or its address if it has no name."""
    return str(row.get("NodeName") or row["NodeManagerAddress"])


def node_name(row: Mapping[str, Any], *, shared: bool) -> str:
    """Return our name of the node; `shared`: several live nodes have its own name."""
    return f"{own_name(row)}-{row['NodeID'][:6]}" if shared else own_name(row)


def _answers(address: str, port: int) -> bool:
    try:
        # Timeout of a connection to a node that may be lost.
        socket.create_connection((address, port), 0.5).close()
    except OSError:
        return False
    return True


ACCELERATOR = "accelerator_type:"
"""Prefix of Ray's resource for a node's accelerators."""


def ray_nodes(address: str = "auto") -> tuple[RayNode, ...]:
    """Return the nodes of the Ray cluster at `address`, sorted by name, lost ones last; `auto`: this machine's cluster.

    Raises:
        RunnerError: there is no such cluster.
    """
    cluster = RayCluster(address, 1)
    try:
        return nodes_of(ray.nodes())
    finally:
        cluster.close()


def nodes_of(table: Sequence[Mapping[str, Any]]) -> tuple[RayNode, ...]:
    """Return the nodes in Ray's own table. Of the lost ones, return the last with each name that no live node has."""
    living = [row for row in table if row["Alive"]]
    alike = Counter(own_name(row) for row in living)
    live_names = (node_name(row, shared=alike[own_name(row)] > 1) for row in living)
    live_nodes = sorted(map(_ray_node, live_names, living), key=lambda node: node.name)
    lost = {own_name(row): _ray_node(own_name(row), row) for row in table if not row["Alive"] and own_name(row) not in alike}
    return (*live_nodes, *(lost[name] for name in sorted(lost)))


def describe_cluster(address: str = "auto") -> ClusterSpec:
    """Describe the live nodes of the Ray cluster at `address`; `auto`: this machine's cluster.

    Raises:
        RunnerError: there is no such cluster, or its nodes differ in devices.
    """
    living = [node for node in ray_nodes(address) if node.alive]
    cluster = cluster_of([node.resources for node in living])
    if cluster.device.kind == "cpu":
        return cluster
    equipped = [node.node_id for node in living if node.resources.get("GPU", 0) >= 1]
    return replace(cluster, kernel_packages=kernel_packages(address, equipped))


def cluster_of(nodes: Sequence[Mapping[str, Any]]) -> ClusterSpec:
    """Describe a cluster of nodes with these Ray resources. If some nodes have GPUs, nodes without a GPU are left out.

    Raises:
        RunnerError: the nodes differ in devices.
    """
    equipped = [node for node in nodes if node.get("GPU", 0) >= 1] or [node for node in nodes if node.get("CPU", 0) >= 1]
    kinds = {(int(node.get("GPU", 0)), int(node.get("CPU", 0)) if not node.get("GPU") else 0, _name(node)) for node in equipped}
    if len(kinds) != 1:
        raise RunnerError("the Ray cluster's nodes differ in devices; describe those to be used in a TOML file, for --cluster")
    ((gpus, cpus, name),) = kinds
    cores = int(min(node.get("CPU", 1) for node in equipped)) or 1
    memory = int(min(node.get("memory", 2**33) for node in equipped))
    return ClusterSpec(
        name="ray",
        nodes=len(equipped),
        devices_per_node=gpus or cpus,
        device=_gpu(name) if gpus else _core(memory // cpus),
        # Ray does not report links; a calibration measures them.
        intra_node_bandwidth=link_of_gpus(_gpu(name).name) if gpus else 2e9,
        # Bytes/s between two nodes, a rough estimate for 25 Gb/s.
        inter_node_bandwidth=2.5e9,
        host_memory_bytes=memory,
        cores_per_node=cores,
    )


def _ray_node(name: str, row: Mapping[str, Any]) -> RayNode:
    alive = bool(row["Alive"])
    return RayNode(
        name=name,
        node_id=str(row["NodeID"]),
        address=str(row["NodeManagerAddress"]),
        host=str(row.get("NodeManagerHostname", "")),
        alive=alive,
        resources=dict(row["Resources"]) if alive else {},
        why_gone="" if alive else str(row.get("DeathReasonMessage") or "Ray does not say why"),
    )


def _name(node: Mapping[str, Any]) -> str:
    return next((key.removeprefix(ACCELERATOR) for key in sorted(node) if key.startswith(ACCELERATOR)), "")


def _gpu(name: str) -> DeviceSpec:
    """Return the preset of the device family that Ray names: H100, A100-40G, AMD-Instinct-MI325X-OAM, …"""
    devices = devices_named(name, whole=False)
    if not devices:
        raise RunnerError(f"no device preset is known for Ray's {name or 'unnamed'} GPUs; describe them in a TOML file")
    return device_preset(devices[0])


def _core(memory: int) -> DeviceSpec:
    peak = CPU_PEAK_FLOPS_PER_CORE
    return DeviceSpec(
        name="cpu",
        kind="cpu",
        memory_bytes=memory,
        peak_flops={"fp32": peak, "fp64": peak / 2},
        memory_bandwidth=CPU_MEMORY_BANDWIDTH / 4,
        source="a rough estimate per core; memory as Ray tells it",
    )


def kernel_packages(address: str, node_ids: Sequence[str]) -> dict[str, str] | None:
    """Return module -> version of the packages that all these nodes have in the same version; None: a node did not answer.

    Raises:
        RunnerError: no Ray answers at the address.
    """
    cluster = RayCluster(address, 1)
    try:
        ray.cloudpickle.register_pickle_by_value(on_node)
        return _asked(node_ids)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(on_node)
        cluster.close()


def in_common(answers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the packages that all have in the same version."""
    first = answers[0] if answers else {}
    return {name: version for name, version in first.items() if all(packages.get(name) == version for packages in answers)}


def _asked(node_ids: Sequence[str]) -> dict[str, str] | None:
    """Query each node by a process that occupies no core, so that it also answers on a busy node."""
    distributions = {package.module: package.distribution for package in PACKAGES.values()}
    ask = ray.remote(max_retries=0)(on_node.installed)
    affinities = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids]
    calls = [ask.options(num_cpus=0, scheduling_strategy=affinity).remote(distributions) for affinity in affinities]
    # Time for a process on every node to start and answer.
    done, late = ray.wait(calls, num_returns=len(calls), timeout=60.0) if calls else ([], [])
    for call in late:
        ray.cancel(call, force=True)
    try:
        return None if late or not done else in_common(ray.get(calls))
    except ray.exceptions.RayError:
        return None
