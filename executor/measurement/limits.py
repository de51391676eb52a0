"""Limits a trial's host memory, so that a trial that exceeds it fails as on a GPU instead of bringing down the host."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from executor.engine import RankContext
from search_spaces.clusters.presets import host_memory_bytes

SLACK_BYTES = 1 << 30
"""For thread stacks, the backend's buffers and memory that the C allocator caches."""


def host_bound(context: RankContext, limit_bytes: int | None, build_bytes: int) -> int | None:
    """Return the bytes by which a rank's host memory may grow in a trial; None: unlimited, as there is no limit.

    On a CPU device the limit applies to host memory: the bound is twice the limit, plus the build's needs and some slack. An
    accelerator's limit does not apply to host memory, which offloading may fill further: the bound is the rank's share of it.

    Args:
        limit_bytes: the trial's limit of device memory per rank.
        build_bytes: memory for building the model before it is sharded.
    """
    if limit_bytes is None:
        return None
    if context.device.type == "cpu":
        return 2 * limit_bytes + build_bytes + SLACK_BYTES
    return host_memory_bytes() // context.ranks_on_host + SLACK_BYTES


@contextmanager
def bounded_memory(growth_bytes: int | None) -> Iterator[None]:
    """Limit the growth of this process's private memory to `growth_bytes` (`host_bound`) inside the block.

    The memory account (`account_step`) decides about the limit; this is the backstop for steps that would not get that far. It
    does nothing without a bound or if the system does not support one. Pinned memory belongs to the driver and is not bounded.
    """
    now = _private_bytes()
    if growth_bytes is None or now is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = now + growth_bytes
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _private_bytes() -> int | None:
    """Return this process's private writable memory, including untouched pages; None if the kernel does not report it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"VmData:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None
