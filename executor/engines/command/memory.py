"""Memory and processor time of a script with everything that it has started."""

import contextlib
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from executor.process_tree import below

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_SHARE = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_TICKS = os.sysconf("SC_CLK_TCK")
COMPILERS = frozenset(
    {
        "ninja",
        "c++",
        "g++",
        "gcc",
        "cc1",
        "cc1plus",
        "collect2",
        "ld",
        "as",
        "clang",
        "clang++",
        "nvcc",
        "cicc",
        "ptxas",
        "cudafe++",
    }
)
"""Programs that extensions are built by when a script first needs them: they hold gigabytes, once, and train nothing."""


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
        seen to hold together, what processes share being divided among them; compilers are left out. At most what was needed at
        one time, or more."""
        return self._own_peak + self._others_peak

    def look(self) -> None:
        """Look at what there is now."""
        parents, ticks, names = _table()
        self.processes = tuple(below(self._supervisor, parents))
        self.cpu_seconds = sum(ticks[process] for process in self.processes) / _TICKS
        self.take_own_peak(_kilobytes(self._script, "status", _PEAK))
        others = [one for one in self.processes if one != self._script and names[one] not in COMPILERS]
        self._others_peak = max(self._others_peak, sum(_kilobytes(process, "smaps_rollup", _SHARE) for process in others))

    def take_own_peak(self, peak: int) -> None:
        """Take what is known of the script's own process: the system tells it, too, when the process has ended."""
        self._own_peak = max(self._own_peak, peak)


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


def _table() -> tuple[dict[int, int], dict[int, int], dict[int, str]]:
    """Every process of the machine: its parent, its processor time in clock ticks, and its program's name."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    names: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):  # noqa: PTH208  a tenth of the time of paths
            if not name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                before, _, rest = file.read().rpartition(b")")
                fields = rest.split()
                parents[int(name)] = int(fields[1])
                ticks[int(name)] = sum(map(int, fields[11:15]))  # its own, and of the children that it has waited for
                names[int(name)] = before.partition(b"(")[2].decode(errors="replace")
    return parents, ticks, names


def _kilobytes(process: int, file: str, pattern: re.Pattern[str]) -> int:
    """In bytes; 0 where it is not told."""
    try:
        found = pattern.search(Path(f"/proc/{process}/{file}").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
