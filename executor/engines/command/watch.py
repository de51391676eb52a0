"""Runs one rank's script under its supervisor and watches it: its reports, memory and CPU time, and whether it should end."""

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from executor.engines.command.launchers import Launch, ScriptProcess
from executor.engines.command.observed import FEWEST_STEPS, MOST_INTERVALS, PROBE_FOLDER, ObservedStep, ObservedWork
from executor.engines.command.readings import Batch, Output, Readings, ReportedStep, ReportFile
from executor.engines.command.steps import ReportedSteps
from executor.measurement.trial_report import Trial
from executor.process_tree import below, out_of_memory_kills
from search_spaces.models.command import CommandModel
from search_spaces.placeholders import names_in, samples_of_step


class State(IntEnum):
    """State of one rank's script. A number, because ranks exchange it as one."""

    RUNNING = 0
    ENOUGH = 1
    """Enough of its steps were timed."""
    ENDED = 2
    """It ended by itself, without an error."""
    BROKEN = 3
    """It ended with an error, or could not be started."""
    OVER = 4
    """It uses more memory than a rank may."""
    WRONG = 5
    """It reported a loss that is not finite."""
    MISUSED = 6
    """It reported something that cannot be parsed."""


FAILURES = (State.BROKEN, State.OVER, State.WRONG, State.MISUSED)


@dataclass(slots=True)
class _Activity:
    """CPU time, output and elapsed time of a silent script, halfway through the time for its first report."""

    cpu_seconds: float
    output: int
    at: float


class ScriptWatch:
    """Starts the script and polls it. Use it from one thread and `close` it."""

    def __init__(self, trial: Trial, command: CommandModel, launch: Launch, folder: Path, on_cpu: bool) -> None:
        request = trial.request
        self._limit = request.memory_limit_bytes
        self._on_cpu = on_cpu
        self.profiled_steps = request.profiled_steps
        work = request.workload
        batch = Batch(
            samples=work.global_batch_size, script_samples=samples_of_step(command, request.config, work, request.world_size),
            micro_batch_samples=request.config.micro_batch_size * request.config.data_parallel_size(request.world_size),
            sequence_length=work.sequence_length, world_size=request.world_size,
        )  # fmt: skip
        self._batch = batch
        self._observed = self._looked_at = self._left_out = 0
        self.left_out_time = [0.0, 0.0]
        """Seconds of the steps that are left out, and of all, without the first ones."""
        self.readings = Readings(batch)
        self.steps = ReportedSteps(trial)
        self.output = Output(folder / "output.log", command.pattern)
        micro_batch_size = request.config.micro_batch_size if "micro_batch_size" in names_in(command) else None
        self.work = ObservedWork(folder / PROBE_FOLDER, micro_batch_size, request.world_size, self.readings.pauses)
        self._data_parallel_size = request.config.data_parallel_size(request.world_size)
        self.reported_seconds: list[float] = []
        """Seconds of every reported step."""
        self.times_observed_work = False
        """Whether the script reports nothing, so that the steps that its probe counts are timed."""
        self._reports = ReportFile(folder / "report.jsonl")
        self._by_pattern = command.pattern is not None
        self._kills = out_of_memory_kills()
        self._began = time.monotonic()
        self._looked = 0.0
        self._half: _Activity | None = None
        self._device_bytes: int | None = None
        self.process = ScriptProcess(launch, folder, folder / "output.log")
        self.tree = ProcessTree(self.process.supervisor_pid, self.process.pid)
        self.state = State.RUNNING
        self.killed_for_memory = False

    @property
    def elapsed(self) -> float:
        """Seconds since the script was started."""
        return time.monotonic() - self._began

    @property
    def peak_bytes(self) -> int:
        """Peak memory that counts against the limit: the device's if the script uses one, else that of its processes."""
        if self._on_cpu:
            return self.tree.peak_bytes
        return self.readings.device_bytes or self._device_bytes or 0

    def look(self) -> State:
        """Read new reports and output; return the state, which no longer changes once it is not RUNNING."""
        ended = self.process.poll()  # before reading its reports, so that the last ones are read
        self._read()
        if self.elapsed - self._looked >= 0.5 or ended is not None:  # seconds between samples of the processes
            self._looked = self.elapsed
            self.tree.look()
        if ended is not None:
            self.tree.record_own_peak(ended.peak_bytes)
        if self.state is State.RUNNING:
            self.state = self._next_state()
        return self.state

    def record_activity(self) -> None:
        """Record the CPU time and output so far, for `is_busy`. Only the first call has an effect."""
        if self._half is None:
            self.tree.look()
            self._half = _Activity(self.tree.cpu_seconds, self.output.length, self.elapsed)

    def is_busy(self) -> bool:
        """Whether the script printed, or used more than 5% of a core, since `record_activity`; one that waits for ever does
        neither."""
        if self._half is None or self.process.exit is not None:
            return False
        self.tree.look()
        used = self.tree.cpu_seconds - self._half.cpu_seconds
        return self.output.length > self._half.output or used > 0.05 * (self.elapsed - self._half.at)

    def look_at_memory(self) -> None:
        """Sample memory a last time while the script lives; ask the driver if its torch did not report device memory."""
        self.tree.look()
        if not self._on_cpu and self.readings.device_bytes is None:
            self._device_bytes = device_bytes(self.tree.processes)

    def close(self) -> None:
        """End the script and read its last reports. May be called twice."""
        self.process.end()
        self._read()
        if self.process.exit is not None:
            self.tree.record_own_peak(self.process.exit.peak_bytes)

    @property
    def step_count(self) -> int:
        """Reports so far; of a script that reports nothing, the steps that its probe counts."""
        return self.readings.count or (0 if self._by_pattern else len(self.work.timed.steps))

    def _read(self) -> None:
        rows = [*self._reports.rows()]
        output_rows = self.output.rows()
        self.work.read()
        self.readings.take(self.work.timed.device_bytes)
        if (samples := self.work.samples_of_step()) is not None:
            self.readings.observed_samples = samples * self._data_parallel_size
        for row in rows if not self._by_pattern else output_rows:
            if (step := self.readings.take(row)) is not None:
                self.reported_seconds.append(step.seconds)
                if not self.times_observed_work and not self._leaves_out(self._since_last_report(row), step.seconds):
                    self.steps.add(step)
        if not self._by_pattern and not self.readings.count and len(self.work.timed.steps) >= FEWEST_STEPS:
            self.times_observed_work = True
        if self.times_observed_work:
            self._time_observed_steps()
        if self._by_pattern:
            for row in rows:  # if a script does both, only the memory of its reports is used
                self.readings.take({name: row[name] for name in ("device_bytes", "reserved_bytes") if name in row})

    def _time_observed_steps(self) -> None:
        """Take the steps that the probe counts."""
        usual = self.readings.observed_samples or self._batch.script_samples
        new = [*self.work.timed.seconds(self._observed)]
        self._observed += len(new)
        ranks = self.work.started_ranks * self._data_parallel_size
        waited = self.readings.take_waited() if new else None
        for seconds, step in new:
            samples = step.samples * ranks if step.certain and step.samples else usual
            if not self._leaves_out([step], seconds):
                scale = self._batch.samples / samples
                part = None if waited is None else waited / len(new) * scale
                self.steps.add(ReportedStep(seconds=seconds * scale, waited=part, samples=samples))

    @property
    def left_out(self) -> tuple[int, int, float]:
        """Number of steps that are left out, that of all, and their share of the time."""
        seconds, total = self.left_out_time
        return self._left_out, self._looked_at, seconds / total if total else 0.0

    def _leaves_out(self, steps: Sequence[ObservedStep], seconds: float) -> bool:
        """Whether an evaluation, a checkpoint or a compilation falls in the time of these steps, unless most steps have one."""
        self._looked_at += 1
        is_apart = any(step.apart for step in steps) and 2 * self._left_out < self._looked_at + FEWEST_STEPS
        self._left_out += is_apart
        if self._looked_at > FEWEST_STEPS:  # the first ones compile
            self.left_out_time[0] += seconds * is_apart
            self.left_out_time[1] += seconds
        return is_apart

    def _since_last_report(self, row: Mapping[str, Any]) -> list[ObservedStep]:
        """The steps that the probe counted between the last two reports; none if the row states its time."""
        if "clock" not in row or len(self.readings.reported_at) < 2:
            return []
        (before, _), (clock, _) = self.readings.reported_at[-2:]
        return [step for step in self.work.timed.steps[-MOST_INTERVALS:] if before < step.clock <= clock]

    def _next_state(self) -> State:
        if self.readings.not_finite:
            return State.WRONG
        if self.readings.problem:
            return State.MISUSED
        if self._is_over():
            return State.OVER
        ended = self.process.exit
        if ended is None and not self.steps.enough:
            return State.RUNNING
        if ended is None:
            # Steps may be reported between two samples of memory: the current memory decides whether they count.
            self.tree.look()
            return State.OVER if self._is_over() else State.ENOUGH
        self.killed_for_memory = ended.code in (-9, 137) and out_of_memory_kills() > self._kills
        return State.ENDED if ended.code == 0 else State.BROKEN

    def _is_over(self) -> bool:
        return self._limit is not None and self.peak_bytes > self._limit


COMPILERS = frozenset({
    "ninja", "c++", "g++", "gcc", "cc1", "cc1plus", "collect2", "ld", "as", "clang", "clang++", "nvcc", "cicc", "ptxas",
    "cudafe++",
})  # fmt: skip
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
        self.compiler = ""
        """Name of a compiler among them at the last look; empty: none runs."""

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
        self.compiler = next((names[pid] for pid in self.processes if names[pid] in COMPILERS), "")
        self.cpu_seconds = sum(ticks[process] for process in self.processes) / os.sysconf("SC_CLK_TCK")
        self.record_own_peak(_bytes_in(self._script, "status", "VmHWM"))
        other_processes = [pid for pid in self.processes if pid != self._script and names[pid] not in COMPILERS]
        self._others_peak = max(
            self._others_peak, sum(_bytes_in(process, "smaps_rollup", "Pss") for process in other_processes)
        )

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
    pids, total = set(processes), 0
    for row in rows:
        with contextlib.suppress(ValueError):
            process, used = row.split(",")
            total += int(float(used)) * 2**20 if int(process) in pids else 0
    return total or None


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
                before, _, after = file.read().rpartition(b")")
                fields = after.split()
                parents[int(name)] = int(fields[1])
                ticks[int(name)] = sum(map(int, fields[11:15]))  # its own and that of children that it has waited for
                names[int(name)] = before.partition(b"(")[2].decode(errors="replace")
    return parents, ticks, names


def _bytes_in(process: int, file: str, name: str) -> int:
    """A value in a file of /proc, in bytes; 0 if it is missing."""
    try:
        match = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{process}/{file}").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
