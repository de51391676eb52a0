"""The training cluster: nodes, their devices, memory, speed and links; uniform, or in groups that differ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from search_spaces.errors import ClusterFormatError

DEVICE_KINDS = ("cpu", "cuda")
PCIE_COPIES = 25e9
"""Bytes/s between a device and its host: achieved by copies over PCIe 4.0 x16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device as specified in its public data sheet; for a CPU: one rank's share of this machine.

    Raises:
        ClusterFormatError: a figure is not positive, or the kind is unknown.
    """

    name: str
    kind: str
    """cpu or cuda (ROCm devices too: torch calls them cuda)."""
    memory_bytes: int
    peak_flops: dict[str, float]
    """Precision (fp32, tf32, bf16, fp16, fp8, mxfp8, fp64) -> dense FLOP/s. A missing precision has no stated peak."""
    memory_bandwidth: float | None = None
    """Bytes/s; None: unknown."""
    host_link: float = PCIE_COPIES
    """Bytes/s between the device and its host's memory, one direction: of copies over PCIe, or of NVLink-C2C."""
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            raise ClusterFormatError("kind", f"{self.kind!r} is not a device kind", "use cpu or cuda")
        _require_positive(self.memory_bytes, "memory_bytes")
        for precision, flops in self.peak_flops.items():
            _require_positive(flops, f"peak_flops.{precision}")
        if self.memory_bandwidth is not None:
            _require_positive(self.memory_bandwidth, "memory_bandwidth")
        _require_positive(self.host_link, "host_link")

    def supports(self, precision: str) -> bool:
        """Whether the device supports `precision`: a CPU not fp8 and mxfp8, a GPU fp32, fp64 and those with a stated peak."""
        if self.kind == "cpu":
            return precision not in ("fp8", "mxfp8")
        return precision in ("fp32", "fp64") or precision in self.peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """A group of identical nodes in a cluster whose nodes differ."""

    nodes: int
    device: DeviceSpec
    intra_node_bandwidth: float
    """As in `ClusterSpec`, for these nodes; likewise the fields below."""
    inter_node_bandwidth: float
    host_memory_bytes: int
    cores_per_node: int
    ray_resource: str = ""
    """The Ray resource that only these nodes have, such as accelerator_type:H100. Trials are placed by it."""

    def __post_init__(self) -> None:
        for field in ("nodes", *LINKS_AND_HOST):
            _require_positive(getattr(self, field), field)


LINKS_AND_HOST = ("intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Nodes with the same number of devices; one rank runs on each device.

    If nodes differ (`mixed_cluster`), every field has the minimum over the nodes, so that what fits there fits everywhere;
    `groups` has the values of each group.

    Raises:
        ClusterFormatError: a count or a bandwidth is not positive, or the groups do not add up to the nodes.
    """

    name: str
    nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_node_bandwidth: float
    """Bytes/s that one device sends to the others of its link domain, one direction."""
    inter_node_bandwidth: float
    """Bytes/s that one node sends to other nodes over all its network cards together, one direction."""
    host_memory_bytes: int
    """Main memory of a node."""
    cores_per_node: int
    """Processor cores of a node."""
    numa_nodes: int | None = None
    """NUMA nodes of a node; None: unknown."""
    kernel_packages: dict[str, str] | None = None
    """Module -> version, of the packages of fused kernels (`fused_kernels`) that every rank can import; None: unknown."""
    link_domain_size: int | None = None
    """Devices that the fast link joins: a multiple of `devices_per_node`, of consecutive nodes; None: those of a node."""
    groups: tuple[NodeGroup, ...] = ()
    """In the order of their ranks; empty if all nodes are alike."""

    def __post_init__(self) -> None:
        for field in (
            "nodes", "devices_per_node", "intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node",
        ):  # fmt: skip
            _require_positive(getattr(self, field), field)
        if self.numa_nodes is not None:
            _require_positive(self.numa_nodes, "numa_nodes")
        self._check_link_domain()
        if self.groups and sum(group.nodes for group in self.groups) != self.nodes:
            problem = f"{self.nodes} are not the {sum(group.nodes for group in self.groups)} of its groups, which differ"
            raise ClusterFormatError("nodes", problem, "describe a cluster of nodes that are alike, or all nodes of this one")
        if len({group.device.kind for group in self.groups}) > 1:
            raise ClusterFormatError("nodes", "some have GPUs and some do not", "describe either kind in a cluster of its own")

    def _check_link_domain(self) -> None:
        size = self.link_domain_size
        if size is None:
            return
        _require_positive(size, "link_domain_size")
        if size % self.devices_per_node:
            problem = f"{size} is not a multiple of the {self.devices_per_node} devices of a node"
            raise ClusterFormatError("link_domain_size", problem, "give the devices of the nodes that the fast link joins")
        if any(group.nodes % self.nodes_per_link_domain for group in self.groups[:-1]):
            problem = f"a link domain of {self.nodes_per_link_domain} nodes has nodes of two kinds"
            raise ClusterFormatError("link_domain_size", problem, "give each kind, except the last, whole link domains")

    @property
    def world_size(self) -> int:
        """Ranks: one per device."""
        return self.nodes * self.devices_per_node

    @property
    def nodes_per_link_domain(self) -> int:
        """Nodes that the fast link joins; 1: it ends at the node."""
        return (self.link_domain_size or self.devices_per_node) // self.devices_per_node

    @property
    def linked_devices(self) -> int:
        """Devices of a link domain; fewer than its size if the cluster has fewer."""
        return min(self.nodes_per_link_domain, self.nodes) * self.devices_per_node

    @property
    def link_domain_text(self) -> str:
        """What the fast link joins, for messages."""
        return "node" if self.linked_devices == self.devices_per_node else "link domain"

    @property
    def most_memory_bytes(self) -> int:
        """Memory of the device with the most memory."""
        return max((group.device.memory_bytes for group in self.groups), default=self.device.memory_bytes)

    @property
    def node_kinds(self) -> tuple[tuple[str, int], ...]:
        """The Ray resource and the number of ranks of each group; empty if all nodes are alike."""
        return tuple((group.ray_resource, group.nodes * self.devices_per_node) for group in self.groups)

    def group_of_rank(self, rank: int) -> int:
        """Index in `groups` of the group that holds this rank; nodes are filled in order."""
        node = rank // self.devices_per_node
        for index, group in enumerate(self.groups):
            if node < group.nodes:
                return index
            node -= group.nodes
        return 0


def with_shape(cluster: ClusterSpec, nodes: int, devices_per_node: int) -> ClusterSpec:
    """The cluster with other numbers of nodes and of devices per node. A link domain keeps its number of nodes."""
    linked = None if cluster.link_domain_size is None else cluster.nodes_per_link_domain * devices_per_node
    return replace(cluster, nodes=nodes, devices_per_node=devices_per_node, link_domain_size=linked)


def with_memory(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster with the memory of every device multiplied by `factor`."""

    def scaled(device: DeviceSpec) -> DeviceSpec:
        return replace(device, memory_bytes=int(device.memory_bytes * factor))

    groups = tuple(replace(group, device=scaled(group.device)) for group in cluster.groups)
    return replace(cluster, device=scaled(cluster.device), groups=groups)


def mixed_cluster(name: str, devices_per_node: int, groups: Sequence[NodeGroup]) -> ClusterSpec:
    """A cluster of node groups. If all groups are alike, the result has no groups.

    Raises:
        ClusterFormatError: there is no group, or as `ClusterSpec`.
    """
    if not groups:
        raise ClusterFormatError("nodes", "there are none", "write a count, or [[nodes]] tables")
    least = {field: min(getattr(group, field) for group in groups) for field in LINKS_AND_HOST}
    alike = len({(group.device.name, *(getattr(group, field) for field in LINKS_AND_HOST)) for group in groups}) == 1
    return ClusterSpec(
        name=name, nodes=sum(group.nodes for group in groups), devices_per_node=devices_per_node,
        device=least_device([group.device for group in groups]), groups=() if alike else tuple(groups), **least,
    )  # fmt: skip


def least_device(devices: Sequence[DeviceSpec]) -> DeviceSpec:
    """What all devices have in common: the minimum memory and speed, in the precisions that all of them support."""
    first = devices[0]
    if all(device == first for device in devices):
        return first
    common = [name for name in first.peak_flops if all(name in device.peak_flops for device in devices)]
    bandwidths = [device.memory_bandwidth for device in devices if device.memory_bandwidth is not None]
    return DeviceSpec(
        name=" and ".join(dict.fromkeys(device.name for device in devices)),
        kind=first.kind,
        memory_bytes=min(device.memory_bytes for device in devices),
        peak_flops={name: min(device.peak_flops[name] for device in devices) for name in common},
        memory_bandwidth=min(bandwidths) if len(bandwidths) == len(devices) else None,
        host_link=min(device.host_link for device in devices),
        source="; ".join(dict.fromkeys(device.source for device in devices if device.source)),
    )


def _require_positive(value: float, field: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ClusterFormatError(field, f"{value!r} is not positive", "give a positive number")
