"""Everything that a rank has started, and its end.

A rank adopts what its children leave behind (`rank_main.adopt_orphans`), so that a process which has daemonised stands below
it still; and all of it carries the rank's mark in its environment, by which it is found when the rank itself has died.

This file imports the standard library alone: the Ray actors carry it by value to workers where nothing of ours is importable.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

MARK = "AUTOTUNE_RUN"
"""Variable in the environment of a rank and of all that it starts: NAMESPACE-PID-START-NUMBER of the process that started the
rank, in its namespace of processes, and of the rank among its ranks."""
TIDY_SECONDS = 1.0
"""How long what is left below a killed rank may live: the supervisor of a user's script ends the script, and removes its folder
and its shared memory."""
KILL_SECONDS = 3.0
"""Longest that is waited for killed processes to be gone: one in the middle of a system call ends after it."""
_POLL_SECONDS = 0.01
_KILLS = re.compile(r"^oom_kill (\d+)", re.MULTILINE)
_GROUPS = Path("/sys/fs/cgroup")


def own_mark(number: int) -> str:
    """The mark for this process's rank of that number."""
    return f"{_namespace()}-{os.getpid()}-{start_of(os.getpid()) or 0}-{number}"


def start_of(process: int) -> int | None:
    """When a process began, in clock ticks since the host's boot: tells a reused pid. None: it is gone, or a zombie."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def descendants(root: int) -> list[int]:
    """The living processes below one, at this moment."""
    parents: dict[int, int] = {}
    for process in _processes():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] not in (b"Z", b"X"):
                parents[process] = int(fields[1])
    return below(root, parents)


def below(root: int, parents: Mapping[int, int]) -> list[int]:
    """The processes below one, of those whose parents are given."""
    children: dict[int, list[int]] = {}
    for process, parent in parents.items():
        children.setdefault(parent, []).append(process)
    found, waiting = [], list(children.get(root, ()))
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting += children.get(process, ())
    return found


def marked(*marks: str) -> list[int]:
    """The living processes that carry one of these marks, wherever they stand by now. Of other users' none is seen."""
    wanted = {f"{MARK}={mark}".encode() for mark in marks}
    return [process for process, found in _marks() if found in wanted and start_of(process) is not None]


def kill_all(roots: Mapping[int, str]) -> list[int]:
    """Kill ranks, given with their marks, and everything that they have started; return the processes when they are gone.

    1. Look who is below them. Where a rank has ended already, the marks tell.
    2. Kill the ranks with their process groups. Supervisors of scripts see it, and tidy up.
    3. Kill what still lives after their time, again and again until nothing is found: it may go on starting more.
    """
    spared = {*roots, os.getpid()}
    seen = {process: start_of(process) for root in roots for process in descendants(root) if process not in spared}
    for root in roots:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(root, signal.SIGKILL)
    tidied = time.monotonic() + TIDY_SECONDS
    while (now := time.monotonic()) < tidied + KILL_SECONDS:
        seen |= {process: start_of(process) for process in marked(*roots.values()) if process not in spared}
        living = [process for process, start in seen.items() if start is not None and start_of(process) == start]
        if not living:
            break
        for process in living if now >= tidied else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return [*roots, *seen]


def kill_strays() -> list[int]:
    """Kill what ranks of dead processes have left; return them. A mark of another namespace of processes says nothing here."""
    strays = []
    for process, found in _marks():
        namespace, _, place = found.decode(errors="replace").partition("=")[2].partition("-")
        parts = place.split("-")
        if namespace != _namespace() or len(parts) != 3 or not all(part.isdigit() for part in parts):
            continue
        if start_of(int(parts[0])) != int(parts[1]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
                strays.append(process)
    return strays


def out_of_memory_kills() -> int:
    """Processes of this control group that the kernel has killed for want of memory; of the machine, where no group tells."""
    counts = [_kills(file) for file in _group_files()]
    told = [count for count in counts if count is not None]
    return sum(told) if told else _kills(Path("/proc/vmstat")) or 0


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208  a tenth of the time of paths
    except OSError:
        return []


def _marks() -> list[tuple[int, bytes]]:
    """Every process that carries a mark, with it, but for this one."""
    found = []
    for process in _processes():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process}/environ").read_bytes()
            at = environment.find(f"{MARK}=".encode())
            if process != os.getpid() and at >= 0 and environment[at - 1 : at] in (b"", b"\0"):
                found.append((process, environment[at:].partition(b"\0")[0]))
    return found


def _namespace() -> str:
    try:
        return Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return "0"


def _group_files() -> list[Path]:
    """Where the control group of this process counts its kills, of either version."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            folder = _GROUPS / controllers / path.lstrip("/")
            found.append(folder / ("memory.oom_control" if controllers else "memory.events"))
    return found


def _kills(file: Path) -> int | None:
    try:
        found = _KILLS.search(file.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None
