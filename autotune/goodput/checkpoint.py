"""What a checkpoint costs: how long training stops, when the copy is safe, and how long a restart reads it."""

from dataclasses import dataclass
from enum import StrEnum

from autotune.errors import RequestError


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
