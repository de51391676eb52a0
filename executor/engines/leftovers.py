"""What DeepSpeed leaves on a host when it is killed: locks of builds, and shared memory. In a rank or in a user's script.

torch's loader of C++ extensions holds a `lock` file while it builds. A process that is killed then leaves it, and every later
one that wants the same extension waits for it, silently, for ever. So each rank has a folder that no other living rank uses,
outside of the user's own cache, kept from sweep to sweep since a build takes a minute; what a lock in it stands beside was
never finished.

DeepSpeed's all-reduce between processes of a host makes files in shared memory, which it removes at its end alone. Their names
have the user, and the address and port of the ranks.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

VARIABLE = "TORCH_EXTENSIONS_DIR"
SHARED_MEMORY = Path("/dev/shm")
_SLOTS = 1024

_held: dict[Path, int] = {}
"""This process's folder -> the open file whose lock makes it so; the system lets go of it when the process ends."""


def extensions_folder() -> Path:
    """This process's folder, with no build in it that was killed. What an earlier holder has compiled is there.

    Raises:
        OSError: there is no place to write.
    """
    folder = next(iter(_held), None) or _taken()
    for lock in list(folder.glob("**/lock")):
        shutil.rmtree(lock.parent, ignore_errors=True)
    return folder


def shared_memory(address: str = "*", port: int | str = "*") -> str:
    """Pattern of the files that DeepSpeed's ranks at this address and port share on this host; `*`: of all of this user's."""
    return str(SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_*")


def remove_shared_memory(address: str, port: int) -> None:
    """Remove them once the trial has ended. A rank that does not live so long leaves it to the supervisor of its script."""
    for path in _files(shared_memory(address, port)):
        with contextlib.suppress(OSError):
            path.unlink()


def remove_orphaned_memory() -> list[str]:
    """Remove what this user's ranks left when they were killed, whatever their port was; return the names.

    A file that some process still maps is in use. Who maps what is read for this user's processes alone, which is enough: the
    files are readable by no other.
    """
    files = _files(shared_memory())
    mapped = _mapped() if files else ""
    orphans = [path for path in files if str(path) not in mapped]
    for path in orphans:
        path.unlink(missing_ok=True)
    return [path.name for path in orphans]


def _taken() -> Path:
    root = Path(tempfile.gettempdir()) / f"autotune-extensions-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user; set {VARIABLE}")
    for slot in range(_SLOTS):
        folder = root / str(slot)
        descriptor = os.open(root / f"{slot}.held", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        folder.mkdir(exist_ok=True)
        _held[folder] = descriptor
        return folder
    raise OSError(f"all folders of {root} are in use; remove it")


def _files(pattern: str) -> list[Path]:
    return [path for path in SHARED_MEMORY.glob(Path(pattern).name) if path.is_file()]


def _mapped() -> str:
    """The memory maps of every process that can be read, as the kernel writes them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            found.append(path.read_text(errors="replace"))
        except OSError:  # another user's, or it has ended
            continue
    return "\n".join(found)
