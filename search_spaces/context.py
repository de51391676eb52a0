"""What rules and conditions read in addition to the configuration."""

from dataclasses import dataclass

from search_spaces.capability import Capability
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.model import Model
from search_spaces.trial import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceContext:
    """The model, cluster, workload and engine: the same for every configuration of a space."""

    model: Model
    cluster: ClusterSpec
    workload: Workload
    world_size: int
    """Training ranks; at most the number of devices of the cluster."""
    capability: Capability | None = None
    """None: any engine, so only the rules refuse configurations."""
