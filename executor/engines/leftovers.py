"""What ranks leave on a host when they are killed: locks of builds, and files of shared memory.

torch's loader of C++ extensions holds a `lock` file while it builds. A process that is killed then leaves it, and every later
one that wants the same extension waits for it, silently, for ever. So each rank has a folder that no other living rank uses,
outside of the user's own cache, kept from sweep to sweep since a build takes a minute; what a lock in it stands beside was
never finished.

DeepSpeed's all-reduce between processes of a host makes files in shared memory, which it removes at its end alone. Their names
have the user, and the address and port of the ranks.

torch and OpenMP put the pid of the process into the names of theirs. Pids are used again, so a file is removed only for a
process that was a rank's, or below one, and is dead: whoever starts ranks writes their pids into a ledger, and holds its lock
while it lives; who finds a ledger that nobody holds removes what it tells of.

This file imports the standard library alone: the Ray actors carry it by value to workers where nothing of ours is importable.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

from executor.process_tree import start_of

VARIABLE = "TORCH_EXTENSIONS_DIR"
SHARED_MEMORY = Path("/dev/shm")
_SLOTS = 1024
_OWNED = re.compile(r"(?:torch_|__KMP_REGISTERED_LIB_)(\d+)_")
"""Names of files of shared memory that tell the process that made them."""

_held: dict[Path, int] = {}
"""This process's folder -> the open file whose lock makes it so; the system lets go of it when the process ends."""
_ledger: list[tuple[Path, int]] = []
"""This process's ledger and its open file, while ranks of it live; the lock says that this process does."""
_noted: set[int] = set()
"""The ranks in it that live."""


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


def remove_files_of(processes: Iterable[int]) -> list[str]:
    """Remove the files of shared memory that these processes made, which are dead; return their names."""
    dead = {str(process) for process in processes}
    removed = []
    for path in SHARED_MEMORY.glob("*"):
        named = _OWNED.match(path.name)
        if named is not None and named[1] in dead:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def note_processes(processes: Collection[int]) -> None:
    """Write into this process's ledger that these are ranks. Where nothing can be written, nothing will be swept."""
    with contextlib.suppress(OSError):
        if not _ledger:
            _ledger.append(_new_ledger())
        os.write(_ledger[0][1], "".join(f"{process}\n" for process in processes).encode())
        _noted.update(processes)


def release_processes(processes: Iterable[int]) -> None:
    """These ranks have ended, and left nothing. The ledger goes with the last of them."""
    _noted.difference_update(processes)
    if _ledger and not _noted:
        path, descriptor = _ledger.pop()
        path.unlink(missing_ok=True)
        os.close(descriptor)


def sweep_ledgers() -> list[str]:
    """Remove what the ranks of dead processes have left, and their ledgers; return the names of the files."""
    removed = []
    with contextlib.suppress(OSError):
        for path in _folder("runs").glob("*.ranks"):
            with path.open("rb") as ledger, contextlib.suppress(OSError):
                fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its process lives
                told = [int(line) for line in ledger.read().split()]
                removed += remove_files_of(process for process in told if start_of(process) is None)
                path.unlink()
    return removed


def _new_ledger() -> tuple[Path, int]:
    descriptor, path = tempfile.mkstemp(suffix=".ranks", dir=_folder("runs"))
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Path(path), descriptor


def _folder(name: str) -> Path:
    """A folder of this user's own, for all processes of ours."""
    root = Path(tempfile.gettempdir()) / f"autotune-{name}-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user; set {VARIABLE if name == 'extensions' else 'TMPDIR'}")
    return root


def _taken() -> Path:
    root = _folder("extensions")
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
