"""Clusters with different nodes: the devices of each pipeline rank, and the resources common to them.

Ranks at one pipeline position do the same work and wait for each other, so the minimum over their devices and links applies.
A set of node groups is encoded as the sum of 2^index of each.
"""

import dataclasses
from functools import lru_cache

import numpy as np

from autotune.prediction.equations.cases import Hardware, scalar
from autotune.prediction.equations.kernels import product_efficiency, sustained_share
from search_spaces.clusters.cluster import ClusterSpec, DeviceSpec
from search_spaces.knobs.computation import MXFP8
from search_spaces.mesh import PIPELINE, make_mesh
from search_spaces.trial_config import TrialConfig


def hardware_of(cluster: ClusterSpec, precision: str) -> Hardware:
    """The cluster's hardware at the precision of the computation; the minimum if nodes differ. With fp8 it is bf16's, which
    `kernels.product_speed` raises for the layers' products."""
    device, precision = cluster.device, "bf16" if precision == "fp8" else precision
    peak = _peak(device, precision)
    idle_cost = 1.0
    if device.kind == "cpu":
        # If `sharing` ranks share a core, then while a pipeline fills and drains half of its ranks idle on average, and the
        # others run min(sharing, 2) times as fast as when all run: half of that time is computation of the rank itself.
        sharing = max(cluster.devices_per_node / cluster.cores_per_node, 1.0)
        idle_cost = max(2.0 / sharing - 1.0, 0.0)
    return Hardware(
        peak=scalar(peak * product_efficiency(device)),
        bandwidth=scalar(device.memory_bandwidth or peak / 100),
        capacity=scalar(device.memory_bytes),
        devices_per_node=scalar(cluster.devices_per_node),
        linked_devices=scalar(cluster.nodes_per_link_domain * cluster.devices_per_node),
        intra=scalar(cluster.intra_node_bandwidth),
        inter=scalar(cluster.inter_node_bandwidth),
        host_link=scalar(device.host_link),
        # Bytes/s of a node's memory per core: eight channels serve about 64 cores.
        host_bandwidth=scalar(max(cluster.cores_per_node * 2.5e9, 2e10)),
        # gloo's reduce-scatter is an all-reduce of which a part is kept: 1.00 of the message on 2 ranks, 1.50 on 4 (counted).
        scatter_volume=scalar(2.0 if device.kind == "cpu" else 1.0),
        idle_cost=scalar(idle_cost),
        sustained=scalar(sustained_share(device, precision)),
        block_products=scalar(float(MXFP8 in device.peak_flops)),
    )


def _peak(device: DeviceSpec, precision: str) -> float:
    """FLOP/s of products. In fp32 they are not in TF32, which torch uses only on request: the engine does not request it (its
    losses on a GPU equal a CPU's to 1e-7, docs/results/gpu.md).
    """
    peaks = device.peak_flops
    # FLOP/s of a device without any stated peak: one of which only the driver's name is known.
    fastest = max(peaks.values(), default=1e14)
    # Where fp32 has no stated peak: on the presets' devices the fastest products are 2 to 16 times as fast.
    return peaks.get(precision) or peaks.get("fp32") or (fastest / 8.0 if precision == "fp32" else fastest)


def devices_of(cluster: ClusterSpec, precision: str) -> tuple[Hardware, ...]:
    """For every set of groups, from {0} on, the minimum over its groups; empty if all nodes are alike."""
    fields = ("nodes", "device", "intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node")
    parts = ({name: getattr(group, name) for name in fields} for group in cluster.groups)
    single = [hardware_of(dataclasses.replace(cluster, groups=(), **part), precision) for part in parts]
    names = [field.name for field in dataclasses.fields(Hardware)]
    sets = ([hardware for index, hardware in enumerate(single) if chosen >> index & 1] for chosen in range(1, 1 << len(single)))
    return tuple(
        Hardware(**{name: scalar(min(getattr(hardware, name)[0] for hardware in some)) for name in names}) for some in sets
    )


def devices_of_ranks(config: TrialConfig, cluster: ClusterSpec) -> tuple[int, ...]:
    """For each pipeline rank, the index of its devices in `devices_of`; empty if all nodes are alike."""
    if not cluster.groups:
        return ()
    counts = tuple(group.nodes * cluster.devices_per_node for group in cluster.groups)
    mesh = make_mesh(config, cluster.world_size)
    return _groups_of_ranks(counts, mesh.tensor * mesh.context, mesh.data, mesh.pipeline, config.rank_order)


@lru_cache(maxsize=4096)
def _groups_of_ranks(counts: tuple[int, ...], replica: int, data: int, pipeline: int, order: str) -> tuple[int, ...]:
    config = TrialConfig(tensor_parallel_size=replica, pipeline_parallel_size=pipeline, rank_order=order)
    mesh = make_mesh(config, replica * data * pipeline)
    ends = np.cumsum(counts)
    group_sets = [0] * pipeline
    for rank in range(mesh.world_size):
        group_sets[mesh.coordinates(rank)[PIPELINE]] |= 1 << int(np.searchsorted(ends, rank, side="right"))
    return tuple(chosen - 1 for chosen in group_sets)
