"""Where is trained: nodes of equal devices, their memory, speed and links."""

from dataclasses import dataclass

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
        """Whether the device computes in `precision`: a CPU in all but fp16, a GPU in fp32, fp64 and what has a stated peak."""
        if self.kind == "cpu":
            return precision != "fp16"
        return precision in ("fp32", "fp64") or precision in self.peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Equal nodes of equal devices; one rank runs on each device.

    Raises:
        ClusterFormatError: a count or a bandwidth is not positive.
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

    def __post_init__(self) -> None:
        for field in (
            "nodes", "devices_per_node", "intra_node_bandwidth", "inter_node_bandwidth", "host_memory_bytes", "cores_per_node",
        ):  # fmt: skip
            _require_positive(getattr(self, field), field)

    @property
    def world_size(self) -> int:
        """Ranks: one a device."""
        return self.nodes * self.devices_per_node


def _require_positive(value: float, field: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ClusterFormatError(field, f"{value!r} is not positive", "give a positive number")
