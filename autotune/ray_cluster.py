"""The cluster that a job runs on, this machine or a Ray cluster, and whether it has the job's devices and data."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import RequestError
from autotune.request.field_forms import parse_shape, reshaped
from autotune.request.request import JobRequest
from executor.detect import local_gpus
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import local_cluster, resolve_cluster
from search_spaces.models.huggingface import BUILT, is_factory_reference

ANY = "auto"
"""Ray's own name for the cluster that this machine belongs to."""


def named_address(address: str | None = None) -> str | None:
    """Return the given address, else that of the environment; None: there is none."""
    return address or next((os.environ[name] for name in ("AUTOTUNE_RAY_ADDRESS", "RAY_ADDRESS") if os.environ.get(name)), None)


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


def cluster_of(request: JobRequest, live: ClusterSpec | None) -> ClusterSpec:
    """Return the cluster that the request names, or the part that trials run on. `live`: for `ray`, the cluster that was found.

    Raises:
        RequestError: the part that trials run on is not available.
        SearchSpaceError: the cluster does not exist, or cannot be described.
    """
    local = request.cluster == "local" and live is None
    ranks = _ranks_of_shape(request.tune_on) if local and request.tune_on is not None else request.ranks
    gpus = local_gpus() if local else None
    if gpus is not None:
        return local_cluster(ranks, request.memory_limit, gpus.name, gpus.count, gpus.memory_bytes)
    cluster = resolve_cluster(request.cluster, ranks, request.memory_limit, live)
    return cluster if local or request.tune_on is None else reshaped(cluster, "tune_on", request.tune_on)


def cluster_here(request: JobRequest) -> ClusterSpec:
    """Return the cluster that the request names; it must be here, or at the request's Ray address.

    Raises:
        RequestError: its devices are missing.
        RunnerError: no Ray answers at the address.
        SearchSpaceError: the cluster does not exist, or cannot be described.
    """
    live = found_cluster(request)
    cluster = cluster_of(request, live)
    if live is None:
        require_here(cluster, address_of(request))
    return cluster


def require_here(cluster: ClusterSpec, address: str | None = None) -> None:
    """Refuse a cluster that is not this machine or at the Ray address: results must not be attributed to another cluster."""
    if cluster.groups and address is None:
        problem = f"{cluster.name} has nodes that differ, and the ranks of this machine are alike"
        raise RequestError("cluster", problem, "give its --ray-address; `autotune plan` predicts for any cluster")
    if address is not None:
        require_capacity(cluster, address)
        return
    if cluster.device.kind == "cpu":
        local_cluster(cluster.world_size)
        return
    gpus = local_gpus()
    if cluster.nodes > 1 or gpus is None or gpus.count < cluster.devices_per_node:
        problem = f"{cluster.name} has {cluster.world_size} GPUs, and this machine has {gpus.count if gpus else 'none'}"
        remedy = "use local, or give its --ray-address; `autotune space` counts for any cluster"
        raise RequestError("cluster", problem, remedy)


def require_text(request: JobRequest) -> None:
    """Refuse data that is missing or too short for one sample; the bounds are those of the ranks (executor.batches)."""
    own_batches = is_factory_reference(request.model) and not request.model.startswith(BUILT)
    if request.data_path is None or own_batches:
        return
    root = Path(request.data_path)
    if not root.exists():
        raise RequestError("data_path", f"{root} does not exist", "give a file or a folder of text")
    files = [root] if root.is_file() else (path for path in root.glob("**/*") if path.is_file())
    total_bytes, least = 0, request.sequence_length + 2
    for path in files:
        total_bytes += path.stat().st_size
        if total_bytes >= least:
            return
    problem = f"{root} holds {total_bytes:,} bytes, fewer than one sample of {request.sequence_length} tokens"
    raise RequestError("data_path", problem, "give more text, or a smaller sequence_length (--sequence-length)")


def _ranks_of_shape(shape: str) -> int:
    """Return the ranks of this part of the machine. Each rank has its full share of memory and cores."""
    nodes, devices = parse_shape("tune_on", shape)
    if nodes > 1:
        raise RequestError("tune_on", f"{shape} has {nodes} nodes, and local is one", f"write 1x{devices}, or name a cluster")
    return devices
