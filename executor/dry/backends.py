"""The memory that a device's allocator and its communication backend add to the tensors of the engine."""

from collections.abc import Mapping
from dataclasses import dataclass

from executor.errors import RunnerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A communication backend and the device that it is used with."""

    name: str
    device_kind: str
    """cpu or cuda."""
    copies: frozenset[str] = frozenset()
    """Operations for which the backend copies the full message. The copy lives until the program has waited for the work."""
    rounding_bytes: int = 1
    """Every allocation is rounded up to a multiple of this."""
    workspace_bytes: int = 0
    """What libraries take from the allocator once, for all steps."""


BACKENDS: Mapping[str, Backend] = {
    # torch 2.13, ProcessGroupGloo.cpp: `reduce_scatter_tensor_coalesced` clones its input and all-reduces the clone, which
    # lives as long as the work; `AsyncAllgatherWork` gathers into a flat tensor and copies that into the output. All-reduce,
    # broadcast and send work in the caller's memory. The CPU allocator reports the requested bytes.
    "gloo": Backend(name="gloo", device_kind="cpu", copies=frozenset({"reduce_scatter", "all_gather"})),
    # NCCL reduces and gathers between the callers' buffers; its own channels are outside of torch's allocator
    # (`non_torch_bytes`). CUDACachingAllocator.cpp, `kMinBlockSize`: blocks are multiples of 512 bytes. cuBLAS gets 32 MiB on
    # Hopper and newer, for the thread of forward and for that of backward (8 MiB on older devices) [CUDABlas.cpp].
    "nccl": Backend(name="nccl", device_kind="cuda", rounding_bytes=512, workspace_bytes=2 * 32 << 20),
}


def backend_of(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        RunnerError: there is no such backend.
    """
    if name not in BACKENDS:
        raise RunnerError(f"there is no backend {name!r} for a dry run; use one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
