"""The Ray cluster that is there, described: its nodes, their devices and cores."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from executor.errors import RunnerError
from executor.runners.ray.cluster import RayCluster
from search_spaces.cluster import ClusterSpec, DeviceSpec
from search_spaces.clusters import CPU_MEMORY_BANDWIDTH, CPU_PEAK_FLOPS_PER_CORE, device_preset
from search_spaces.preset_files import preset_tables

ACCELERATOR = "accelerator_type:"
"""What Ray's resources call a node's accelerators by."""
LINK_BANDWIDTH = 3.1e10
"""Bytes/s between two GPUs of a node, a rough estimate of PCIe 4.0: Ray does not tell of links, a calibration does."""
LOOPBACK_BANDWIDTH = 2e9
NETWORK_BANDWIDTH = 2.5e9
"""Bytes/s between two nodes, a rough estimate of 25 Gb/s."""


def describe_cluster(address: str = "auto") -> ClusterSpec:
    """The live nodes of the Ray cluster at `address`; `auto`: the cluster that this machine belongs to.

    Raises:
        RunnerError: there is none, or its nodes differ in devices.
    """
    cluster = RayCluster(address, 1)
    try:
        return cluster_of([node["Resources"] for node in ray.nodes() if node["Alive"]])
    finally:
        cluster.close()


def cluster_of(nodes: Sequence[Mapping[str, Any]]) -> ClusterSpec:
    """The cluster of nodes with these Ray resources. Nodes without a GPU are left out where others have some.

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
        intra_node_bandwidth=LINK_BANDWIDTH if gpus else LOOPBACK_BANDWIDTH,
        inter_node_bandwidth=NETWORK_BANDWIDTH,
        host_memory_bytes=memory,
        cores_per_node=cores,
    )


def _name(node: Mapping[str, Any]) -> str:
    return next((key.removeprefix(ACCELERATOR) for key in sorted(node) if key.startswith(ACCELERATOR)), "")


def _gpu(name: str) -> DeviceSpec:
    """The preset of the family that Ray names: H100, A100-40G, …"""
    family = name.lower().partition("-")[0]
    fitting = [key for key in preset_tables("devices") if key.partition("-")[0] == family]
    if not fitting:
        raise RunnerError(f"no device preset is known for Ray's {name or 'unnamed'} GPUs; describe them in a TOML file")
    size = "40" if name.endswith("40G") else "80"
    sized = [key for key in fitting if size in key and "pcie" not in key]
    return device_preset((sized or fitting)[0])


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
