"""Memory and processor time of a script with everything that it has started."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_SHARE = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_KILLS = re.compile(r"^oom_kill (\d+)", re.MULTILINE)
_TICKS = os.sysconf("SC_CLK_TCK")
_GROUPS = Path("/sys/fs/cgroup")


class ProcessTree:
    """The processes below a supervisor. Where the system has no /proc, everything stays 0."""

    def __init__(self, supervisor: int, script: int) -> None:
        self._supervisor, self._script = supervisor, script
        self._own_peak = 0
        self._others_peak = 0
        self.cpu_seconds = 0.0
        """Of all processes that lived at the last look, since each began."""
        self.processes: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Highest resident set of the script's own process, which the system keeps exactly, and the most that the others were
        seen to hold together, what processes share being divided among them. At most what was needed at one time, or more."""
        return self._own_peak + self._others_peak

    def look(self) -> None:
        """Look at what there is now."""
        parents, ticks = _table()
        self.processes = tuple(_below(self._supervisor, parents))
        self.cpu_seconds = sum(ticks[process] for process in self.processes) / _TICKS
        self.take_own_peak(_kilobytes(self._script, "status", _PEAK))
        others = sum(_kilobytes(process, "smaps_rollup", _SHARE) for process in self.processes if process != self._script)
        self._others_peak = max(self._others_peak, others)

    def take_own_peak(self, peak: int) -> None:
        """Take what is known of the script's own process: the system tells it, too, when the process has ended."""
        self._own_peak = max(self._own_peak, peak)


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory, in this machine and in this control group, since it started."""
    files = [Path("/proc/vmstat"), *_group_files()]
    return sum(_kills(file) for file in files)


def device_bytes(processes: Iterable[int]) -> int | None:
    """Device memory of these processes by the driver; None: it does not tell, or they have none."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    wanted, found = set(processes), 0
    for row in rows:
        with contextlib.suppress(ValueError):
            process, used = row.split(",")
            found += int(float(used)) * 2**20 if int(process) in wanted else 0
    return found or None


def _table() -> tuple[dict[int, int], dict[int, int]]:
    """Every process of the machine: its parent, and its processor time in clock ticks."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):  # noqa: PTH208  a tenth of the time of paths
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
                parents[int(name)] = int(fields[1])
                ticks[int(name)] = sum(map(int, fields[11:15]))  # its own, and of the children that it has waited for
    return parents, ticks


def _below(root: int, parents: dict[int, int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for process, parent in parents.items():
        children.setdefault(parent, []).append(process)
    found, waiting = [], list(children.get(root, ()))
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting += children.get(process, ())
    return found


def _kilobytes(process: int, file: str, pattern: re.Pattern[str]) -> int:
    """In bytes; 0 where it is not told."""
    try:
        found = pattern.search(Path(f"/proc/{process}/{file}").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


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


def _kills(file: Path) -> int:
    try:
        found = _KILLS.search(file.read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0
