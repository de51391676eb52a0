"""What DeepSpeed leaves on a host: compiled extensions with their locks, and shared memory of ranks that were killed."""

import fcntl
import os
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
SHARED_PREFIX = "deepspeed_allreduce_buffer"
"""Of the files of its shared-memory all-reduce; the user's id, address and port follow."""
MOST_FOLDERS = 256


def extensions_folder(root: Path) -> tuple[Path, int]:
    """A folder for what torch compiles at run time, this process's alone for as long as it lives, and what keeps it so.

    A process that is killed while it compiles leaves a `lock` behind, at which every later one waits for ever. So each process
    holds a folder of its own by a lock that the system drops with it, and takes up what an earlier holder has compiled: any
    `lock` in there is then nobody's, and what it guarded is incomplete.

    Raises:
        OSError: no folder can be made or held.
    """
    root.mkdir(parents=True, exist_ok=True)
    for number in range(MOST_FOLDERS):
        descriptor = os.open(root / f"{number}.held", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        folder = root / str(number)
        folder.mkdir(exist_ok=True)
        for lock in list(folder.glob("**/lock")):
            shutil.rmtree(lock.parent)
        return folder, descriptor
    raise OSError(f"{root} holds {MOST_FOLDERS} folders that are all in use; remove it")


def remove_orphaned_memory(root: Path = SHARED_MEMORY) -> list[str]:
    """Remove the shared memory that DeepSpeed's ranks of this user left when they were killed; return the names.

    A file that some process still maps is in use. Who maps what is read for this user's processes alone, which is enough: the
    files are readable by no other.
    """
    files = [path for path in root.glob(f"{SHARED_PREFIX}_{os.getuid()}_*") if path.is_file()]
    if not files:
        return []
    mapped = _mapped()
    orphans = [path for path in files if str(path) not in mapped]
    for path in orphans:
        path.unlink(missing_ok=True)
    return [path.name for path in orphans]


def _mapped() -> str:
    """The memory maps of every process that can be read, as the kernel writes them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:  # another user's, or it has ended
            continue
    return "\n".join(found)
