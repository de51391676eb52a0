"""The Ray cluster that a job runs on: where it is, what it is, and whether it has what the job wants."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.errors import RequestError
from autotune.request.request import JobRequest
from search_spaces.cluster import ClusterSpec

VARIABLES = ("AUTOTUNE_RAY_ADDRESS", "RAY_ADDRESS")
"""Where the address is looked for when no option and no file names one; the first that is set wins."""
ANY = "auto"
"""Ray's own name for the cluster that this machine belongs to."""


def named_address(given: str | None = None) -> str | None:
    """The address that was given, else that of the environment; None: there is none."""
    return given or next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)


def with_address(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request with the environment's address, where they leave it open and run on Ray."""
    found = named_address() if fields.get("runner", "ray") == "ray" and fields.get("ray_address") is None else None
    return {**fields, "ray_address": found} if found else {**fields}


def run_by(request: JobRequest, runner: str | None, address: str | None) -> JobRequest:
    """The request by that runner, at that address; None: its own runner, and the environment's address, else its own."""
    by = runner or request.runner
    there = (named_address(address) or request.ray_address) if by == "ray" else address
    cluster = "local" if by != "ray" and request.cluster == "ray" else request.cluster
    return dataclasses.replace(request, runner=by, ray_address=there, cluster=cluster)


def address_of(request: JobRequest) -> str | None:
    """What the ranks of a job join; None: no Ray, or one of their own on this machine."""
    if request.runner != "ray":
        return None
    return request.ray_address or ((named_address() or ANY) if request.cluster == "ray" else None)


def found_cluster(request: JobRequest) -> ClusterSpec | None:
    """What is at the job's address, where the request asks for just that (`ray`); None: it names its cluster.

    Raises:
        RunnerError: no Ray answers there, or its nodes cannot be described.
    """
    if request.cluster != "ray" or request.resolved_cluster is not None:
        return None
    return _described(address_of(request) or ANY)


def asked_cluster(name: str | None, address: str | None) -> tuple[str, ClusterSpec | None]:
    """The cluster that something is predicted for, and what is at its Ray address; None: it is described, not looked at.

    Nothing runs there. So the environment's address is one of `ray` alone: `local` stays this machine, whatever runs on it.

    Raises:
        RequestError: an address is given beside a cluster that is described.
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


def require_room(cluster: ClusterSpec, address: str) -> None:
    """Refuse a cluster that is more than what is at a Ray address: what was measured there would be told as another's.

    Raises:
        RequestError: devices are missing; the line says how many.
        RunnerError: no Ray answers there.
    """
    from executor.runners.ray.describe import ray_nodes

    require_devices(cluster, [node.resources for node in ray_nodes(address) if node.alive], address)


def require_devices(cluster: ClusterSpec, nodes: Sequence[Mapping[str, float]], address: str) -> None:
    """As `require_room`, of nodes with these Ray resources."""
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
        wanted = f"{cluster.nodes} x {cluster.devices_per_node} GPUs"
        has = f"{gpus} on {len(nodes)} nodes" if gpus else "no GPU"
        problem = f"{cluster.name} is {wanted}, and Ray at {address} has {has}"
        raise RequestError(
            "cluster", problem, "start Ray on nodes that have them (`ray start --num-gpus`), or use --cluster ray"
        )


def _require_groups(cluster: ClusterSpec, nodes: Sequence[Mapping[str, float]], address: str) -> None:
    """Of nodes that differ each kind must be told from the others, and be there."""
    names = [group.ray_resource for group in cluster.groups]
    if not all(names) or len(set(names)) < len(names):
        problem = f"{cluster.name} has nodes that differ, and it is not said how Ray tells each kind"
        remedy = (
            "give each [[nodes]] table a ray_resource of its own (accelerator_type:H100, or one of `ray start --resources`)"
        )
        raise RequestError("cluster", problem, remedy)
    for group in cluster.groups:
        there = sum(node.get(group.ray_resource, 0) > 0 for node in nodes)
        if there < group.nodes:
            problem = f"{cluster.name} has {group.nodes} nodes with {group.ray_resource}, and Ray at {address} has {there}"
            raise RequestError("cluster", problem, "start Ray on them, with that resource, or describe what is there")


def _described(address: str) -> ClusterSpec:
    # Imported where it is asked for: Ray takes seconds to load.
    from executor.runners.ray.describe import describe_cluster

    return describe_cluster(address)
