"""A trial that asks for far more of the host's memory than it may have fails as on a GPU, instead of bringing down the host."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from executor.engine import RankContext
from search_spaces.clusters import host_memory_bytes

SLACK_BYTES = 1 << 30
"""Thread stacks, the backend's buffers and what the C allocator keeps."""


def host_bound(context: RankContext, limit_bytes: int | None, build_bytes: int) -> int | None:
    """Bytes of the host's memory by which a rank may grow in a trial; None: any, as without a limit.

    Where the device is the CPU its limit is one of the host's memory: twice that, the build's needs and some slack. The limit
    of an accelerator says nothing of the host, which offloading may fill with more: there it is the rank's share of the host.

    Args:
        limit_bytes: the trial's limit per rank, of its device.
        build_bytes: what building the model takes before it is sharded.
    """
    if limit_bytes is None:
        return None
    if context.device.type == "cpu":
        return 2 * limit_bytes + build_bytes + SLACK_BYTES
    return host_memory_bytes() // context.ranks_on_host + SLACK_BYTES


@contextmanager
def bounded_memory(growth_bytes: int | None) -> Iterator[None]:
    """While it holds, private memory of this process grows by at most so many bytes (`host_bound`).

    The verdict is the allocator account's (`account_step`); this is the backstop for steps that would not get so far. Does
    nothing without a bound or where the system has none. Pinned memory is the driver's, and not bounded.
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
    """Private writable memory of this process, mapped or not touched yet; None where the kernel does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    found = re.search(r"VmData:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None
