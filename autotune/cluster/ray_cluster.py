"""The Ray cluster that a job runs on: its address, its description, and whether it has the job's devices."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.errors import RequestError
from autotune.request.request import JobRequest
from search_spaces.clusters.cluster import ClusterSpec

VARIABLES = ("AUTOTUNE_RAY_ADDRESS", "RAY_ADDRESS")
"""Variables with the address if no option and no file has one; the first that is set wins."""
ANY = "auto"
"""Ray's own name for the cluster that this machine belongs to."""


def named_address(address: str | None = None) -> str | None:
    """Return the given address, else that of the environment; None: there is none."""
    return address or next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)


def with_address(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request with the environment's address, if they run on Ray and have no address."""
    address = named_address() if fields.get("runner", "ray") == "ray" and fields.get("ray_address") is None else None
    return {**fields, "ray_address": address} if address else {**fields}


def run_by(request: JobRequest, runner: str | None, address: str | None) -> JobRequest:
    """Return the request with this runner and address. Without a runner, it keeps its own. Without an address, it gets the
    environment's, else it keeps its own."""
    runner = runner or request.runner
    ray_address = (named_address(address) or request.ray_address) if runner == "ray" else address
    cluster = "local" if runner != "ray" and request.cluster == "ray" else request.cluster
    return dataclasses.replace(request, runner=runner, ray_address=ray_address, cluster=cluster)


def address_of(request: JobRequest) -> str | None:
    """Return the Ray address that a job's ranks join; None: no Ray, or their own Ray on this machine."""
    if request.runner != "ray":
        return None
    return request.ray_address or ((named_address() or ANY) if request.cluster == "ray" else None)


def found_cluster(request: JobRequest) -> ClusterSpec | None:
    """Describe the cluster at the job's address, if the request asks for it (`ray`); None: the request names its cluster.

    Raises:
        RunnerError: no Ray answers there, or its nodes cannot be described.
    """
    if request.cluster != "ray" or request.resolved_cluster is not None:
        return None
    return _described(address_of(request) or ANY)


def asked_cluster(name: str | None, address: str | None) -> tuple[str, ClusterSpec | None]:
    """Return the cluster's name for a prediction, and for `ray` the cluster at its address; None: the name has a description.

    Nothing runs there, so the environment's address only applies to `ray`: `local` stays this machine.

    Raises:
        RequestError: an address is given with a cluster that has a description.
        RunnerError: no Ray answers there, or its nodes cannot be described.
    """
    name = name or ("ray" if address is not None else "local")
    if name == "ray":
        return name, _described(named_address(address) or ANY)
    if address is not None:
        raise RequestError(
            "ray_address", f"nothing runs there, and {name} is described already", "use --cluster ray for its nodes"
        )
    return name, None


def require_capacity(cluster: ClusterSpec, address: str) -> None:
    """Refuse a cluster that exceeds the one at a Ray address: results would be attributed to another cluster.

    Raises:
        RequestError: devices are missing; the message says how many.
        RunnerError: no Ray answers there.
    """
    from executor.runners.ray.nodes import ray_nodes

    require_devices(cluster, [node.resources for node in ray_nodes(address) if node.alive], address)


def require_devices(cluster: ClusterSpec, nodes: Sequence[Mapping[str, float]], address: str) -> None:
    """`require_capacity` for nodes with these Ray resources."""
    if cluster.groups:
        _require_groups(cluster, nodes, address)
    if cluster.device.kind == "cpu":
        slots = int(sum(node.get("CPU", 0) for node in nodes))
        if slots < cluster.world_size:
            problem = f"{cluster.name} has {cluster.world_size} ranks, and Ray at {address} has {slots} CPUs"
            raise RequestError("cluster", problem, "add nodes, or give fewer --ranks")
        return
    wide = sum(node.get("GPU", 0) >= cluster.devices_per_node for node in nodes)
    if wide < cluster.nodes:
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        needed = f"{cluster.nodes} x {cluster.devices_per_node} GPUs"
        has = f"{gpus} on {len(nodes)} nodes" if gpus else "no GPU"
        problem = f"{cluster.name} is {needed}, and Ray at {address} has {has}"
        raise RequestError(
            "cluster", problem, "start Ray on nodes that have them (`ray start --num-gpus`), or use --cluster ray"
        )


def _require_groups(cluster: ClusterSpec, nodes: Sequence[Mapping[str, float]], address: str) -> None:
    """Check that each kind of node has a distinct Ray resource, and that there are enough nodes of each."""
    names = [group.ray_resource for group in cluster.groups]
    if not all(names) or len(set(names)) < len(names):
        problem = f"{cluster.name} has nodes that differ, and it is not stated how Ray distinguishes each kind"
        remedy = (
            "give each [[nodes]] table a ray_resource of its own (accelerator_type:H100, or one of `ray start --resources`)"
        )
        raise RequestError("cluster", problem, remedy)
    for group in cluster.groups:
        node_count = sum(node.get(group.ray_resource, 0) > 0 for node in nodes)
        if node_count < group.nodes:
            problem = f"{cluster.name} has {group.nodes} nodes with {group.ray_resource}, and Ray at {address} has {node_count}"
            raise RequestError("cluster", problem, "start Ray on them, with that resource, or describe what is there")


def _described(address: str) -> ClusterSpec:
    # Imported on demand: Ray takes seconds to load.
    from executor.runners.ray.nodes import describe_cluster

    return describe_cluster(address)
