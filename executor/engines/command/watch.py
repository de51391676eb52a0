"""One rank's script while it runs: what it told, what it holds, and whether anything speaks for its end."""

import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from executor.engines.command.memory import ProcessTree, device_bytes
from executor.engines.command.process import Launch, ScriptProcess
from executor.engines.command.readings import Batch, Output, Readings, ReportFile, StepTold
from executor.engines.command.stopwatch import ReportedSteps
from executor.measurement.trial_state import Trial
from executor.process_tree import out_of_memory_kills
from search_spaces.command import CommandModel

TREE_SECONDS = 0.5
"""How often the processes of a script are looked at."""
BUSY_SHARE = 0.05
"""Of a processor that a script which does something takes at least."""


class State(IntEnum):
    """Where one rank's script stands. A number, because ranks tell it each other as one."""

    RUNNING = 0
    ENOUGH = 1
    """Its steps were timed as long as they had to be."""
    ENDED = 2
    """It ended by itself, without an error."""
    BROKEN = 3
    """It ended otherwise, or could not be started."""
    OVER = 4
    """It holds more memory than a rank may."""
    WRONG = 5
    """It told a loss that is no number."""
    MISUSED = 6
    """It told something that cannot be read."""


FAILURES = (State.BROKEN, State.OVER, State.WRONG, State.MISUSED)


@dataclass(slots=True)
class _Activity:
    """What a silent script did since the middle of the time that it is given."""

    cpu_seconds: float
    output: int
    at: float


class Watch:
    """Starts the script, and looks at it again and again. Used from one thread; `close` it."""

    def __init__(self, trial: Trial, command: CommandModel, launch: Launch, folder: Path, on_cpu: bool) -> None:
        request = trial.request
        self._limit = request.memory_limit_bytes
        self._on_cpu = on_cpu
        work = request.workload
        batch = Batch(samples=work.global_batch_size, sequence_length=work.sequence_length, world_size=request.world_size)
        self.readings = Readings(batch)
        self.steps = ReportedSteps(trial)
        self.output = Output(folder / "output.log", command.pattern)
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
        """What counts against the limit: of the device where the script uses one, else of its processes."""
        if self._on_cpu:
            return self.tree.peak_bytes
        return self.readings.device_bytes or self._device_bytes or 0

    def look(self) -> State:
        """Read on; the state stays what it is once it is not RUNNING, but for an end that comes after."""
        ended = self.process.poll()  # before what it told, so that its end is seen after the last of it
        self._read()
        if self.elapsed - self._looked >= TREE_SECONDS or ended is not None:
            self._looked = self.elapsed
            self.tree.look()
        if ended is not None:
            self.tree.take_own_peak(ended.peak_bytes)
        if self.state is State.RUNNING:
            self.state = self._judged()
        return self.state

    def note_half(self) -> None:
        """Remember what it has done up to now, for `is_busy`."""
        if self._half is None:
            self.tree.look()
            self._half = _Activity(self.tree.cpu_seconds, self.output.length, self.elapsed)

    def is_busy(self) -> bool:
        """Whether it has done something since `note_half`: a script that waits for ever does not."""
        if self._half is None or self.process.exit is not None:
            return False
        self.tree.look()
        used = self.tree.cpu_seconds - self._half.cpu_seconds
        return self.output.length > self._half.output or used > BUSY_SHARE * (self.elapsed - self._half.at)

    def look_at_memory(self) -> None:
        """The last look while it lives; at the device by the driver, where its own torch does not tell of it."""
        self.tree.look()
        if not self._on_cpu and self.readings.device_bytes is None:
            self._device_bytes = device_bytes(self.tree.processes)

    def close(self, grace: float) -> None:
        """End the script and read the last of what it told. May be called twice."""
        self.process.end(grace)
        self._read()
        if self.process.exit is not None:
            self.tree.take_own_peak(self.process.exit.peak_bytes)

    def _read(self) -> None:
        rows = [*self._reports.rows()]
        found = self.output.rows()
        for row in rows if not self._by_pattern else found:
            self._take(self.readings.take(row))
        if self._by_pattern:
            for row in rows:  # of a script that does both, memory alone is taken
                self.readings.take({name: row[name] for name in ("device_bytes", "reserved_bytes") if name in row})

    def _take(self, step: StepTold | None) -> None:
        if step is not None:
            self.steps.add(step)

    def _judged(self) -> State:
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
            # Steps may be told between two looks at memory: what it holds by now decides whether they count.
            self.tree.look()
            return State.OVER if self._is_over() else State.ENOUGH
        self.killed_for_memory = ended.code in (-9, 137) and out_of_memory_kills() > self._kills
        return State.ENDED if ended.code == 0 else State.BROKEN

    def _is_over(self) -> bool:
        return self._limit is not None and self.peak_bytes > self._limit
