"""Cluster shapes: NODESxDEVICES of a known cluster."""

import dataclasses
import re

from autotune.errors import RequestError
from search_spaces.clusters.cluster import ClusterSpec, with_shape


def parse_shape(name: str, shape: str) -> tuple[int, int]:
    """Parse to (nodes, devices per node).

    Raises:
        RequestError: `shape`, given as the field `name`, is not NODESxDEVICES.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,2})", shape) if isinstance(shape, str) else None
    if found is None:
        raise RequestError(name, f"{shape!r} is not NODESxDEVICES", "write 2x8 for 2 nodes of 8 devices")
    return int(found[1]), int(found[2])


def reshaped(cluster: ClusterSpec, name: str, shape: str) -> ClusterSpec:
    """The cluster with the nodes and devices per node of `shape`. Raises as `parse_shape`."""
    nodes, devices = parse_shape(name, shape)
    label = f"{cluster.name.partition(':')[0]}:{nodes}"
    return dataclasses.replace(with_shape(cluster, nodes, devices), name=label)


def shape_text(cluster: ClusterSpec) -> str:
    """The cluster's shape as NODESxDEVICES."""
    return f"{cluster.nodes}x{cluster.devices_per_node}"
