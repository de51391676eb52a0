"""What must not be left when everything has ended: processes, and files in shared memory."""

import contextlib
import time
from pathlib import Path

MARK = "AUTOTUNE_CHAOS_MARK"
"""The variable by which whatever a test started is found, whoever its parent is by now."""


def marked_processes(mark: str) -> list[str]:
    """Numbers and command lines of the processes that carry the mark and live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
            if ours and (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(f"{folder.name} " + (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
    return found


def shared_memory() -> set[str]:
    """Names of the files in shared memory."""
    return {file.name for file in Path("/dev/shm").iterdir()}


def abandoned_since(before: set[str], seconds: float = 60.0, others: tuple[str, ...] = ()) -> list[str]:
    """Names of the files in shared memory that were not there before, that no process has open, and that stay so for seconds.

    A process that ends, or a tracker after it, removes its files a moment later. Names that begin as `others` are left out.
    """
    limit = time.monotonic() + seconds
    while True:
        found = {name for name in shared_memory() - before if not name.startswith(others)}
        left = {name for name in found if not _is_open(Path("/dev/shm") / name)} & shared_memory()
        if not left or time.monotonic() > limit:
            return sorted(left)
        time.sleep(0.5)


def _is_open(file: Path) -> bool:
    """Whether some process has mapped the file: other tests on this machine have files of their own."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(file) in maps.read_text():
                return True
    return False
