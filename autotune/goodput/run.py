"""A run on nodes that fail: its checkpoints, and its parameters for the closed form."""

import math
from dataclasses import dataclass
from enum import StrEnum

from autotune.errors import RequestError
from autotune.goodput.failures import FailureRates


class CheckpointKind(StrEnum):
    """How the state is saved."""

    SYNCHRONOUS = "synchronous"
    """Training stops until the file system has all bytes."""
    ASYNCHRONOUS = "asynchronous"
    """Training stops for the copy into host memory; the file system is written beside training."""
    PEERS = "peers"
    """As asynchronous, but the copy goes to the host memory of another node instead of the file system. Two copies exist; that
    both nodes fail within one recovery is neglected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Bytes of parameters and optimizer state of a layout. Gradients and activations are not saved."""

    total_bytes: float
    """Every state once: what the file system holds."""
    saved_bytes_per_device: float
    """Most bytes that one device saves: copies on several devices are saved once, in equal parts."""
    loaded_bytes_per_device: float
    """Most bytes that one device reads after a restart: all of its states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Bytes per second of the paths that a checkpoint takes.

    Raises:
        RequestError: one is not positive.
    """

    write: float = 100e9
    """Of the file system, all nodes together. The default is assumed: a twentieth of the 2 TB/s of Llama 3's."""
    read: float = 100e9
    node: float = 20e9
    """Between one node and the file system, or another node."""
    host: float = 20e9
    """From one device to host memory, all devices of a node at once."""

    def __post_init__(self) -> None:
        for name in ("write", "read", "node", "host"):
            if not getattr(self, name) > 0:
                raise RequestError(f"{name}_bandwidth", f"{getattr(self, name)} is not positive", "give bytes per second")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Times of one checkpoint."""

    blocking_seconds: float
    """How long training stops."""
    durable_seconds: float
    """From the end of the stop until a failure no longer loses the checkpoint. The next one starts after that."""
    load_seconds: float
    """How long a restart reads it."""
    kind: CheckpointKind = CheckpointKind.SYNCHRONOUS

    def __post_init__(self) -> None:
        for name in ("blocking_seconds", "durable_seconds", "load_seconds"):
            if not getattr(self, name) >= 0:
                raise RequestError("checkpoint", f"{name} is {getattr(self, name)}", "give 0 or a positive number")


def checkpoint_of(
    state: SavedState, bandwidths: Bandwidths, kind: CheckpointKind, devices_per_node: int, slowdown: float = 0.0
) -> Checkpoint:
    """The times of a checkpoint of `state`.

    1. To the file system: the slower of all bytes over its bandwidth and a node's bytes over the node's.
    2. To a peer: a node's bytes over the node's bandwidth. It is read back the same way.
    3. Copy to the host: the bytes of a device over its bandwidth.
    4. Writing beside training slows it: `slowdown` of the time is added to the stop.

    Args:
        state: bytes of the layout.
        bandwidths: bytes per second.
        kind: how it is saved.
        devices_per_node: devices of a node.
        slowdown: share by which training is slower while a checkpoint is written beside it.
    """
    saved = state.saved_bytes_per_device * devices_per_node / bandwidths.node
    loaded = state.loaded_bytes_per_device * devices_per_node / bandwidths.node
    written = max(state.total_bytes / bandwidths.write, saved)
    read = max(state.total_bytes / bandwidths.read, loaded)
    copied = state.saved_bytes_per_device / bandwidths.host
    if kind is CheckpointKind.SYNCHRONOUS:
        return Checkpoint(blocking_seconds=written, durable_seconds=0.0, load_seconds=read, kind=kind)
    beside, back = (written, read) if kind is CheckpointKind.ASYNCHRONOUS else (saved, loaded)
    return Checkpoint(blocking_seconds=copied + slowdown * beside, durable_seconds=beside, load_seconds=back, kind=kind)


class Recovery(StrEnum):
    """What the job does after a failure."""

    RESTART = "restart"
    """Wait for a node if one is missing, start the job again, load the last checkpoint, repeat the work since then."""
    MIGRATE = "migrate"
    """Rebuild the lost ranks on a spare node from copies of their state, and repeat the interrupted step. Failures that lose
    all copies restart."""
    DROP = "drop"
    """Continue without the replica that failed until it is back. Its samples are not processed in the meantime."""
    REPLAN = "replan"
    """Restart from the last checkpoint on the remaining nodes; start again when the node is back, without losing work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A layout that trains on `nodes` nodes, and its recovery. Times are in seconds.

    Raises:
        RequestError: a field is out of range, or replicas cannot be dropped.
    """

    nodes: int
    """Nodes that compute. Spares are extra."""
    step_seconds: float
    """A step without failures."""
    failures: FailureRates
    checkpoint: Checkpoint
    recovery: Recovery = Recovery.RESTART
    detection_seconds: float = 120.0
    """From a failure until the job has stopped."""
    restart_seconds: float = 300.0
    """From the stop until processes run again, without loading the checkpoint."""
    spares: int = 0
    """Nodes that wait for a failure."""
    replacement_seconds: float = 4 * 3600.0
    """Mean time until a failed node is repaired or replaced; it is then a spare, or used at once."""
    in_place_share: float = 1.0
    """MIGRATE, DROP: share of failures that they survive without a restart."""
    in_place_seconds: float = 60.0
    """MIGRATE: move to the spare. DROP: continue without the replica. After detection."""
    join_seconds: float = 300.0
    """DROP: from a node being there until its replica takes part again."""
    replicas: int = 1
    """DROP: model replicas of the layout."""
    step_overhead: float = 1.0
    """Factor on the step time that the recovery costs without failures."""
    lost_rate: float = 0.0
    """REPLAN: share of the rate that one missing node costs."""
    planned_seconds: float = 600.0
    """Duration of a planned interruption: save, maintain, load."""

    def __post_init__(self) -> None:
        for name in ("nodes", "replicas"):
            if getattr(self, name) < 1:
                raise RequestError(name, f"{getattr(self, name)} is not positive", "give at least 1")
        for name, least in (("step_seconds", 0.0), ("step_overhead", 1.0)):
            if not getattr(self, name) >= least or not getattr(self, name) > 0:
                raise RequestError(name, f"{getattr(self, name)} is too small", f"give more than {least:g}")
        for name in (
            "detection_seconds", "restart_seconds", "spares", "replacement_seconds", "in_place_seconds", "join_seconds",
            "planned_seconds",
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise RequestError(name, f"{getattr(self, name)} is negative or not finite", "give 0 or a positive number")
        for name in ("in_place_share", "lost_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(name, f"{getattr(self, name)} is not in [0, 1]", "give a share such as 0.9")
        if self.recovery is Recovery.DROP and self.replicas < 2:
            raise RequestError("recovery", "drop needs a second replica, and the layout has 1", "use restart or migrate")

    @property
    def rate(self) -> float:
        """Unexpected failures per second."""
        return self.failures.per_second(self.nodes)

    @property
    def taking_rate(self) -> float:
        """Failures per second that take a node."""
        failures = self.failures
        taking = sum(kind.per_node_day for kind in failures.kinds if kind.takes_node)
        return self.rate * (taking / failures.per_node_day if failures.per_node_day else 0.0)

    @property
    def planned_rate(self) -> float:
        """Planned interruptions per second of running."""
        return self.failures.planned_per_day / 86400

    @property
    def detections(self) -> tuple[tuple[float, float], ...]:
        """(Share of the failures, seconds to detect them), for each kind."""
        return self.failures.detections(self.detection_seconds)

    @property
    def step(self) -> float:
        """Seconds of a step, with the overhead of the recovery."""
        return self.step_seconds * self.step_overhead

    @property
    def rollback_share(self) -> float:
        """Share of failures after which the last checkpoint is loaded."""
        return 1 - self.in_place_share if self.recovery in (Recovery.MIGRATE, Recovery.DROP) else 1.0

    @property
    def rollback_seconds(self) -> float:
        """Restart and load after the detection of a failure."""
        return self.restart_seconds + self.checkpoint.load_seconds

    @property
    def waits(self) -> bool:
        """Whether the job stops while a node is missing."""
        return self.recovery in (Recovery.RESTART, Recovery.MIGRATE)

    def require_interval(self, interval: float) -> None:
        """Check an interval between checkpoints, in seconds of work.

        Raises:
            RequestError: it is shorter than a step, or than the time in which a checkpoint becomes durable.
        """
        if not interval >= self.step * (1 - 1e-9):
            raise RequestError("interval", f"{interval:g} s is shorter than a step of {self.step:g} s", "give a longer one")
        least = self.checkpoint.durable_seconds - self.checkpoint.blocking_seconds
        if interval < least * (1 - 1e-9):
            problem = f"{interval:g} s end before a checkpoint is written, which takes {self.checkpoint.durable_seconds:g} s"
            raise RequestError("interval", problem, f"give at least {least:g} s, or more bandwidth")
