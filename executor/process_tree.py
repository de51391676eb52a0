"""Finds and ends all processes that a rank has started, and removes what killed ranks leave on a host: lock files of builds and
files of shared memory.

A rank adopts the orphans of its children (`rank_main.main`), so that a daemonised process remains its descendant. All of these
processes also carry the rank's mark in their environment, by which they are found after the rank itself has died.

torch's loader of C++ extensions holds a `lock` file while it builds. A process that is killed then leaves the file, and every
later process that needs the same extension waits for it silently and for ever. Therefore each rank has a folder that no other
living rank uses, outside the user's cache and kept between sweeps, since a build takes a minute. A build next to a lock in it
was never finished.

DeepSpeed's all-reduce between processes of a host creates files in shared memory and removes them only at its normal end.
Their names contain the user, and the address and port of the ranks.

torch and OpenMP put the pid of the process into the names of their files. Pids are reused, so a file is removed only for a dead
process that was a rank or a descendant of one. A process that starts ranks writes their pids into a ledger and locks it while
it lives; a process that finds an unlocked ledger removes the files of its pids.

This file imports only the standard library: Ray actors carry it by value to workers where our packages are not importable.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

MARK = "AUTOTUNE_RUN"
"""Environment variable of a rank and of all processes that it starts: NAMESPACE-PID-START-NUMBER. The first three identify the
process that started the rank, the PID being one of its PID namespace; NUMBER identifies the rank among its ranks."""
KILL_SECONDS = 3.0
"""Longest wait for killed processes to disappear: a process inside a system call ends only after that call."""


def own_mark(number: int) -> str:
    """Return the mark of this process's rank with that number."""
    return f"{_namespace()}-{os.getpid()}-{start_of(os.getpid()) or 0}-{number}"


def start_of(process: int) -> int | None:
    """Return the start time of a process in clock ticks since boot, which exposes a reused PID. None: ended or a zombie."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def descendants(root: int) -> list[int]:
    """Return the living descendants of a process at this moment."""
    parents: dict[int, int] = {}
    for process in _processes():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X"):
                parents[process] = int(fields[1])
    return below(root, parents)


def below(root: int, parents: Mapping[int, int]) -> list[int]:
    """Return the descendants of a process among those whose parents are given."""
    children: dict[int, list[int]] = {}
    for process, parent in parents.items():
        children.setdefault(parent, []).append(process)
    processes, waiting = [], list(children.get(root, ()))
    while waiting:
        process = waiting.pop()
        processes.append(process)
        waiting += children.get(process, ())
    return processes


def marked(*marks: str) -> list[int]:
    """Return the living processes that carry one of these marks, whatever their parent. Other users' processes are not seen."""
    variables = {f"{MARK}={mark}".encode() for mark in marks}
    return [process for process, variable in _marks() if variable in variables and start_of(process) is not None]


def kill_all(roots: Mapping[int, str]) -> list[int]:
    """Kill ranks, given with their marks, and everything that they have started; return the processes once they are gone.

    1. Find their descendants, by the marks where a rank has already ended.
    2. Kill the ranks with their process groups. Supervisors of scripts notice this and clean up.
    3. After a second, kill what still lives, repeatedly until nothing is found: a process may start others meanwhile.
    """
    spared = {*roots, os.getpid()}
    processes = {process: start_of(process) for root in roots for process in descendants(root) if process not in spared}
    for root in roots:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(root, signal.SIGKILL)
    # How long the descendants of a killed rank may live. In this time the supervisor of a user's script ends the script and
    # removes its folder and its shared memory.
    tidied = time.monotonic() + 1.0
    while (now := time.monotonic()) < tidied + KILL_SECONDS:
        processes |= {process: start_of(process) for process in marked(*roots.values()) if process not in spared}
        living = [process for process, start in processes.items() if start is not None and start_of(process) == start]
        if not living:
            break
        for process in living if now >= tidied else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return [*roots, *processes]


def kill_strays() -> list[int]:
    """Kill what the ranks of dead processes have left; return the PIDs. Marks of other PID namespaces are ignored."""
    strays = []
    for process, variable in _marks():
        namespace, _, origin = variable.decode(errors="replace").partition("=")[2].partition("-")
        parts = origin.split("-")
        if namespace != _namespace() or len(parts) != 3 or not all(part.isdigit() for part in parts):
            continue
        if start_of(int(parts[0])) != int(parts[1]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
                strays.append(process)
    return strays


def out_of_memory_kills() -> int:
    """Count the processes of this control group that the kernel has killed for lack of memory; without a group's count, those
    of the machine."""
    counts = [count for file in _group_files() if (count := _kills(file)) is not None]
    return sum(counts) if counts else _kills(Path("/proc/vmstat")) or 0


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  a tenth of the time of paths
    except OSError:
        return []


def _marks() -> list[tuple[int, bytes]]:
    """Return every process that carries a mark, with the mark, except this process."""
    marked_processes = []
    for process in _processes():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process}/environ").read_bytes()
            at = environment.find(f"{MARK}=".encode())
            if process != os.getpid() and at >= 0 and environment[at - 1 : at] in (b"", b"\0"):
                marked_processes.append((process, environment[at:].partition(b"\0")[0]))
    return marked_processes


def _namespace() -> str:
    try:
        return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return "0"


def _group_files() -> list[Path]:
    """Return the files in which this process's control group (version 1 or 2) counts its kills."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            folder = Path("/sys/fs/cgroup") / controllers / path.lstrip("/")
            files.append(folder / ("memory.oom_control" if controllers else "memory.events"))
    return files


def _kills(file: Path) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
SHARED_MEMORY = Path("/dev/shm")

_locked_folders: dict[Path, int] = {}
"""This process's folder -> the descriptor of its locked file; the kernel releases the lock when the process ends."""
_ledger: list[tuple[Path, int]] = []
"""This process's ledger and its descriptor, while it has living ranks; the lock shows that this process is alive."""
_recorded: set[int] = set()
"""The living ranks in the ledger."""


def extensions_folder() -> Path:
    """This process's folder, without interrupted builds and without locks. It contains the finished builds of earlier holders.

    A lock of torch before 2.14 shows an interrupted build, for which every later build would wait. From 2.14 on, each build
    has one. A build is finished if ninja's log contains its library.

    Raises:
        OSError: no folder can be written.
    """
    folder = next(iter(_locked_folders), None) or _claim_folder()
    for lock in list(folder.glob("**/lock")):
        log = lock.with_name(".ninja_log")
        if log.exists() and re.search(r"\.so\t", log.read_text(encoding="utf-8", errors="replace")):
            lock.unlink(missing_ok=True)
        else:
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
        raise PermissionError(
            f"{root} belongs to another user; set {EXTENSIONS_VARIABLE if name == 'extensions' else 'TMPDIR'}"
        )
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
        _locked_folders[folder] = descriptor
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
