"""Finds and ends all processes that a rank has started.

A rank adopts the orphans of its children (`rank_main.adopt_orphans`), so that a daemonised process remains its descendant. All
of these processes also carry the rank's mark in their environment, by which they are found after the rank itself has died.

This file imports only the standard library: Ray actors carry it by value to workers where our packages are not importable.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

MARK = "AUTOTUNE_RUN"
"""Environment variable of a rank and of all processes that it starts: NAMESPACE-PID-START-NUMBER. The first three identify the
process that started the rank, the PID being one of its PID namespace; NUMBER identifies the rank among its ranks."""
TIDY_SECONDS = 1.0
"""How long the descendants of a killed rank may live. In this time the supervisor of a user's script ends the script and
removes its folder and its shared memory."""
KILL_SECONDS = 3.0
"""Longest wait for killed processes to disappear: a process inside a system call ends only after that call."""
_POLL_SECONDS = 0.01


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
    3. After `TIDY_SECONDS`, kill what still lives, repeatedly until nothing is found: a process may start others meanwhile.
    """
    spared = {*roots, os.getpid()}
    processes = {process: start_of(process) for root in roots for process in descendants(root) if process not in spared}
    for root in roots:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(root, signal.SIGKILL)
    tidied = time.monotonic() + TIDY_SECONDS
    while (now := time.monotonic()) < tidied + KILL_SECONDS:
        processes |= {process: start_of(process) for process in marked(*roots.values()) if process not in spared}
        living = [process for process, start in processes.items() if start is not None and start_of(process) == start]
        if not living:
            break
        for process in living if now >= tidied else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
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
