"""What a device's allocator and its communication backend add to the tensors that the engine makes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from executor.errors import RunnerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One communication backend on the device that it is used with."""

    name: str
    device_kind: str
    """cpu or cuda."""
    copies: Mapping[str, float] = field(default_factory=dict)
    """Operation -> what the backend allocates for itself until the operation has ended, as a share of the full message."""
    rounding_bytes: int = 1
    """Every allocation is a multiple of this."""


BACKENDS: Mapping[str, Backend] = {
    # torch 2.13, ProcessGroupGloo.cpp: `reduce_scatter_tensor_coalesced` clones its input and all-reduces the clone, which lives
    # as long as the work; `AsyncAllgatherWork` gathers into a flat tensor and copies that into the output. All-reduce, broadcast
    # and send work in the caller's memory. The CPU allocator reports the bytes that were asked for.
    "gloo": Backend(name="gloo", device_kind="cpu", copies={"reduce_scatter": 1.0, "all_gather": 1.0}),
    # NCCL reduces and gathers between the callers' buffers; its own channels are outside of torch's allocator
    # (`non_torch_bytes`). CUDACachingAllocator.cpp, `kMinBlockSize`: blocks are multiples of 512 bytes.
    "nccl": Backend(name="nccl", device_kind="cuda", rounding_bytes=512),
}


def backend_of(name: str) -> Backend:
    """The backend of that name.

    Raises:
        RunnerError: there is none.
    """
    if name not in BACKENDS:
        raise RunnerError(f"there is no backend {name!r} for a dry run; use one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
