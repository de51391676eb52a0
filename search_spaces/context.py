"""What the rules and conditions look at beside the configuration."""

from dataclasses import dataclass

from search_spaces.capability import Capability
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.model import Model
from search_spaces.trial import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceContext:
    """What is trained, where and by which engine: the same for every configuration of a space."""

    model: Model
    cluster: ClusterSpec
    workload: Workload
    world_size: int
    """Ranks that train; at most the cluster's devices."""
    capability: Capability | None = None
    """None: any engine, so that only the rules refuse."""
