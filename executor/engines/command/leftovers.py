"""What a DeepSpeed script that is killed leaves on its host: locks of builds, and shared memory.

torch's loader of C++ extensions holds a `lock` file while it builds. A script that is killed then leaves it, and every later
process that wants the same extension waits for it, silently, for ever. So each rank has a folder that no other living rank
uses, kept from sweep to sweep since a build takes a minute; what a lock in it stands beside was never finished.

DeepSpeed's all-reduce between processes of a host makes files in shared memory, which it removes at its end alone. Their names
have the port of the trial.
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

_held: dict[str, int] = {}
"""Folder -> the open file whose lock makes it this process's own; the system lets go of it when the process ends."""


def extensions_folder() -> Path:
    """This process's folder, with no build in it that was killed.

    Raises:
        OSError: there is no place to write.
    """
    folder = next(map(Path, _held), None) or _taken()
    for lock in list(folder.glob("**/lock")):
        shutil.rmtree(lock.parent, ignore_errors=True)
    return folder


def shared_memory(address: str, port: int) -> str:
    """Pattern of the files that DeepSpeed's ranks of a trial share on this host."""
    return str(SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_*")


def remove_shared_memory(address: str, port: int) -> None:
    """Remove them once the trial has ended. A rank that does not live so long leaves it to the supervisor of its script."""
    for path in SHARED_MEMORY.glob(Path(shared_memory(address, port)).name):
        with contextlib.suppress(OSError):
            path.unlink()


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
        _held[str(folder)] = descriptor
        return folder
    raise OSError(f"all folders of {root} are in use; set {VARIABLE}")
