"""The cluster that a request names, and checks that its devices and data are here, or at a Ray address."""

from pathlib import Path

from autotune.cluster.ray_cluster import address_of, found_cluster, require_capacity
from autotune.errors import RequestError
from autotune.request.field_forms import parse_shape, reshaped
from autotune.request.request import JobRequest
from executor.detect import local_gpus
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import local_cluster, resolve_cluster
from search_spaces.models.huggingface import BUILT, is_factory_reference


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
