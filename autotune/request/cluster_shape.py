"""Clusters by their shape: NODESxDEVICES of a cluster that is known."""

import dataclasses
import re

from autotune.errors import RequestError
from search_spaces.clusters.cluster import ClusterSpec


def parse_shape(name: str, shape: str) -> tuple[int, int]:
    """(nodes, devices of a node).

    Raises:
        RequestError: `shape`, given as the field `name`, is no NODESxDEVICES.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,2})", shape) if isinstance(shape, str) else None
    if found is None:
        raise RequestError(name, f"{shape!r} is no NODESxDEVICES", "write 2x8 for 2 nodes of 8 devices")
    return int(found[1]), int(found[2])


def reshaped(cluster: ClusterSpec, name: str, shape: str) -> ClusterSpec:
    """So many nodes of so many devices of a cluster. Raises what `parse_shape` raises."""
    nodes, devices = parse_shape(name, shape)
    called = f"{cluster.name.partition(':')[0]}:{nodes}"
    return dataclasses.replace(cluster, name=called, nodes=nodes, devices_per_node=devices)


def shape_text(cluster: ClusterSpec) -> str:
    """A cluster as NODESxDEVICES."""
    return f"{cluster.nodes}x{cluster.devices_per_node}"
