"""Where is trained: nodes, their devices, memory, speed and links; all alike, or in groups that differ."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from search_spaces.errors import ClusterFormatError

DEVICE_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One device as its public data sheet states it; of a CPU: one rank's share of this machine.

    Raises:
        ClusterFormatError: a figure is not positive, or the kind is not known.
    """

    name: str
    kind: str
    """cpu or cuda (ROCm devices too: torch calls them cuda)."""
    memory_bytes: int
    peak_flops: dict[str, float]
    """Precision (fp32, tf32, bf16, fp16, fp8, fp64) -> dense FLOP/s. A precision that is not there has no stated peak."""
    memory_bandwidth: float | None = None
    """Bytes/s; None: not known."""
    source: str = ""
    """Where the figures come from."""

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            raise ClusterFormatError("kind", f"{self.kind!r} is no kind of device", "use cpu or cuda")
        _require_positive(self.memory_bytes, "memory_bytes")
        for precision, flops in self.peak_flops.items():
            _require_positive(flops, f"peak_flops.{precision}")
        if self.memory_bandwidth is not None:
            _require_positive(self.memory_bandwidth, "memory_bandwidth")

    def supports(self, precision: str) -> bool:
        """Whether the device computes in `precision`: a CPU in all but fp8, a GPU in fp32, fp64 and what has a stated peak."""
        if self.kind == "cpu":
            return precision != "fp8"
        return precision in ("fp32", "fp64") or precision in self.peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes of a cluster that are alike, where others of it are not."""

    nodes: int
    device: DeviceSpec
    intra_node_bandwidth: float
    """As `ClusterSpec`'s, of these nodes; so are the fields below."""
    inter_node_bandwidth: float
    host_memory_bytes: int
    cores_per_node: int
    ray_resource: str = ""
    """The Ray resource that these nodes have and others have not, such as accelerator_type:H100: trials are placed by it."""

    def __post_init__(self) -> None:
        for field in ("nodes", *LINKS_AND_HOST):
            _require_positive(getattr(self, field), field)


LINKS_AND_HOST = ("intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Nodes of as many devices; one rank runs on each device.

    Of nodes that differ (`mixed_cluster`) every field says what the least of them has, so that what holds for it holds for all;
    `groups` says what each has.

    Raises:
        ClusterFormatError: a count or a bandwidth is not positive, or the groups are not the nodes.
    """

    name: str
    nodes: int
    devices_per_node: int
    device: DeviceSpec
    intra_node_bandwidth: float
    """Bytes/s that one device sends to the others of its node, one direction."""
    inter_node_bandwidth: float
    """Bytes/s that one node sends to other nodes over all its network cards together, one direction."""
    host_memory_bytes: int
    """Main memory of a node."""
    cores_per_node: int
    """Processor cores of a node."""
    numa_nodes: int | None = None
    """Parts of a node whose cores and memory are near each other; None: not known."""
    kernel_packages: dict[str, str] | None = None
    """Module -> version, of the packages of fused kernels (`fused_kernels`) that every rank can import; None: not known."""
    groups: tuple[NodeGroup, ...] = ()
    """In the order of their ranks; none where all nodes are alike."""

    def __post_init__(self) -> None:
        for field in (
            "nodes", "devices_per_node", "intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node",
        ):  # fmt: skip
            _require_positive(getattr(self, field), field)
        if self.numa_nodes is not None:
            _require_positive(self.numa_nodes, "numa_nodes")
        if self.groups and sum(group.nodes for group in self.groups) != self.nodes:
            problem = f"{self.nodes} are not the {sum(group.nodes for group in self.groups)} of its groups, which differ"
            raise ClusterFormatError("nodes", problem, "describe a cluster of nodes that are alike, or all nodes of this one")
        if len({group.device.kind for group in self.groups}) > 1:
            raise ClusterFormatError("nodes", "some have GPUs and some do not", "describe either kind in a cluster of its own")

    @property
    def world_size(self) -> int:
        """Ranks: one a device."""
        return self.nodes * self.devices_per_node

    @property
    def most_memory_bytes(self) -> int:
        """Memory of the device that has most."""
        return max((group.device.memory_bytes for group in self.groups), default=self.device.memory_bytes)

    @property
    def node_kinds(self) -> tuple[tuple[str, int], ...]:
        """Of each group the Ray resource that tells its nodes, and its ranks; none where all nodes are alike."""
        return tuple((group.ray_resource, group.nodes * self.devices_per_node) for group in self.groups)

    def group_of_rank(self, rank: int) -> int:
        """The place in `groups` of the nodes that a rank is among; nodes are filled in their order."""
        node = rank // self.devices_per_node
        for place, group in enumerate(self.groups):
            if node < group.nodes:
                return place
            node -= group.nodes
        return 0


def with_memory(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster with so many times as much memory on every device."""

    def more(device: DeviceSpec) -> DeviceSpec:
        return replace(device, memory_bytes=int(device.memory_bytes * factor))

    groups = tuple(replace(group, device=more(group.device)) for group in cluster.groups)
    return replace(cluster, device=more(cluster.device), groups=groups)


def mixed_cluster(name: str, devices_per_node: int, groups: Sequence[NodeGroup]) -> ClusterSpec:
    """A cluster of nodes that differ; of groups that are all alike one without groups.

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
    """What every one of the devices has: the least memory and speed, in precisions that all of them compute in."""
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
        source="; ".join(dict.fromkeys(device.source for device in devices if device.source)),
    )


def _require_positive(value: float, field: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ClusterFormatError(field, f"{value!r} is not positive", "give a positive number")
