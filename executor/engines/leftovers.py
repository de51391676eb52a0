"""Removes what killed ranks leave on a host: lock files of builds and files of shared memory.

torch's loader of C++ extensions holds a `lock` file while it builds. A process that is killed then leaves the file, and every
later process that needs the same extension waits for it silently and for ever. Therefore each rank has a folder that no other
living rank uses, outside the user's cache and kept between sweeps, since a build takes a minute. A build next to a lock in it
was never finished.

DeepSpeed's all-reduce between processes of a host creates files in shared memory and removes them only at its normal end.
Their names contain the user, and the address and port of the ranks.

torch and OpenMP put the pid of the process into the names of their files. Pids are reused, so a file is removed only for a dead
process that was a rank or a descendant of one. A process that starts ranks writes their pids into a ledger and locks it while
it lives; a process that finds an unlocked ledger removes the files of its pids.

This file imports only the standard library, since Ray actors carry it by value to workers where our packages are missing.
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

_held: dict[Path, int] = {}
"""This process's folder -> the descriptor of its locked file; the kernel releases the lock when the process ends."""
_ledger: list[tuple[Path, int]] = []
"""This process's ledger and its descriptor, while it has living ranks; the lock shows that this process is alive."""
_recorded: set[int] = set()
"""The living ranks in the ledger."""


def extensions_folder() -> Path:
    """This process's folder, without interrupted builds. It contains the finished builds of earlier holders.

    Raises:
        OSError: no folder can be written.
    """
    folder = next(iter(_held), None) or _claim_folder()
    for lock in list(folder.glob("**/lock")):
        shutil.rmtree(lock.parent, ignore_errors=True)
    return folder


def shared_memory(address: str = "*", port: int | str = "*") -> str:
    """Pattern of the files that DeepSpeed's ranks at this address and port share on this host; `*`: all ranks of this user."""
    return str(SHARED_MEMORY / f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_*")


def remove_shared_memory(address: str, port: int) -> None:
    """Remove these files after the trial. If the rank dies earlier, the supervisor of its script removes them."""
    for path in _files(shared_memory(address, port)):
        with contextlib.suppress(OSError):
            path.unlink()


def remove_orphaned_memory() -> list[str]:
    """Remove the files that this user's ranks left when they were killed, on any port; return their names.

    A file that a process still maps is in use. Only the maps of this user's processes are read, which suffices, because other
    users cannot read the files.
    """
    files = _files(shared_memory())
    mapped = _mapped() if files else ""
    orphans = [path for path in files if str(path) not in mapped]
    for path in orphans:
        path.unlink(missing_ok=True)
    return [path.name for path in orphans]


def remove_files_of(processes: Iterable[int]) -> list[str]:
    """Remove the shared-memory files that these dead processes created; return their names."""
    dead = {str(process) for process in processes}
    removed = []
    for path in SHARED_MEMORY.glob("*"):
        owner = re.match(r"(?:torch_|__KMP_REGISTERED_LIB_)(\d+)_", path.name)  # names with the pid of their creator
        if owner is not None and owner[1] in dead:
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def note_processes(processes: Collection[int]) -> None:
    """Record these ranks in this process's ledger. If it cannot be written, their files will not be swept."""
    with contextlib.suppress(OSError):
        if not _ledger:
            descriptor, path = tempfile.mkstemp(suffix=".ranks", dir=_folder("runs"))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _ledger.append((Path(path), descriptor))
        os.write(_ledger[0][1], "".join(f"{process}\n" for process in processes).encode())
        _recorded.update(processes)


def release_processes(processes: Iterable[int]) -> None:
    """Remove these ranks, which have ended and left nothing, from the ledger. The last one removes the ledger."""
    _recorded.difference_update(processes)
    if _ledger and not _recorded:
        path, descriptor = _ledger.pop()
        path.unlink(missing_ok=True)
        os.close(descriptor)


def sweep_ledgers() -> list[str]:
    """Remove the files left by ranks of dead processes, and their ledgers; return the names of the files."""
    removed = []
    with contextlib.suppress(OSError):
        for path in _folder("runs").glob("*.ranks"):
            with path.open("rb") as ledger, contextlib.suppress(OSError):
                fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its process lives
                ranks = [int(line) for line in ledger.read().split()]
                removed += remove_files_of(process for process in ranks if start_of(process) is None)
                path.unlink()
    return removed


def _folder(name: str) -> Path:
    """A per-user folder that all our processes share."""
    root = Path(tempfile.gettempdir()) / f"autotune-{name}-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user; set {VARIABLE if name == 'extensions' else 'TMPDIR'}")
    return root


def _claim_folder() -> Path:
    root = _folder("extensions")
    for slot in range(1024):
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
    """The memory maps of every readable process, in the kernel's format."""
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(path.read_text(errors="replace"))
        except OSError:  # it belongs to another user, or has ended
            continue
    return "\n".join(maps)
