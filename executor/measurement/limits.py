"""A trial on the CPU that asks for far more memory than its limit fails as on a GPU, instead of bringing down the host."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SLACK_BYTES = 1 << 30
"""Thread stacks, the backend's buffers and what the C allocator keeps."""


@contextmanager
def bounded_memory(limit_bytes: int | None, build_bytes: int) -> Iterator[None]:
    """While it holds, private memory of this process grows by at most twice the limit, the build's needs and some slack.

    The verdict is the allocator account's (`account_step`); this is the backstop for steps that would not get so far. Does
    nothing without a limit or where the system has no such bound.

    Args:
        limit_bytes: the trial's limit per rank, in bytes.
        build_bytes: what building the model takes before it is sharded, in bytes.
    """
    now = _private_bytes()
    if limit_bytes is None or now is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = now + 2 * limit_bytes + build_bytes + SLACK_BYTES
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
