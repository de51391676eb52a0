"""Memory and CPU time of a script and all its child processes."""

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
"""Programs that build extensions when a script first needs them. They use gigabytes once and are not part of training."""


class ProcessTree:
    """The descendants of a supervisor process. On a system without /proc, everything stays 0."""

    def __init__(self, supervisor: int, script: int) -> None:
        self._supervisor, self._script = supervisor, script
        self._own_peak = 0
        self._others_peak = 0
        self.cpu_seconds = 0.0
        """CPU time of all processes that were alive at the last look, since each one started."""
        self.processes: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Peak resident set of the script's own process (exact, from the kernel), plus the highest total PSS that was sampled
        for the other processes, without compilers. The two peaks may be at different times, so the sum is an upper bound up to
        sampling."""
        return self._own_peak + self._others_peak

    def look(self) -> None:
        """Sample the current processes."""
        parents, ticks, names = _table()
        self.processes = tuple(below(self._supervisor, parents))
        self.cpu_seconds = sum(ticks[process] for process in self.processes) / _TICKS
        self.record_own_peak(_bytes_in(self._script, "status", _PEAK))
        others = [one for one in self.processes if one != self._script and names[one] not in COMPILERS]
        self._others_peak = max(self._others_peak, sum(_bytes_in(process, "smaps_rollup", _SHARE) for process in others))

    def record_own_peak(self, peak: int) -> None:
        """Record a peak of the script's own process [bytes]; the kernel also reports it when the process has ended."""
        self._own_peak = max(self._own_peak, peak)


def device_bytes(processes: Iterable[int]) -> int | None:
    """Device memory of these processes according to the driver [bytes]; None: it is not reported, or they use none."""
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
    """Parent, CPU time [clock ticks] and program name of every process of the machine."""
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
                ticks[int(name)] = sum(map(int, fields[11:15]))  # its own and that of children that it has waited for
                names[int(name)] = before.partition(b"(")[2].decode(errors="replace")
    return parents, ticks, names


def _bytes_in(process: int, file: str, pattern: re.Pattern[str]) -> int:
    """The value in a file of /proc, in bytes; 0 if it is missing."""
    try:
        found = pattern.search(Path(f"/proc/{process}/{file}").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
