"""The state of a running trial, and its progress reports."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from executor.engine import RankContext
from executor.measurement.clocks import ClockState
from executor.measurement.device import DeviceCounters, counters_of
from executor.measurement.fewer import Line, line_of
from executor.measurement.meter import Costs
from executor.measurement.racing import Race, race_of
from executor.measurement.timing import MIN_STEPS_FOR_INTERVAL, step_time
from search_spaces.trial import Interval, Progress, TrialRequest


@dataclass(slots=True)
class Trial:
    """The state of a running trial."""

    context: RankContext
    request: TrialRequest
    progress: Callable[[Progress], None]
    phase: str = "build"
    step: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    flops: int | None = None
    """Executed on this rank in one step; None: not counted."""
    skipped: int = 0
    """Runs so far whose gradients overflowed, so that the step was repeated."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    own_seconds: float = 0.0
    """Duration of the last step on this rank, from the moment at which all ranks began it."""
    warm_seconds: list[float] = field(default_factory=list)
    """Seconds of every full step of warm-up."""
    race: Race | None = field(init=False)
    line: Line | None = field(init=False)
    counters: DeviceCounters = field(init=False)
    """The counters of the rank's device."""

    def __post_init__(self) -> None:
        self.race = race_of(self.request)
        self.line = line_of(self.request)
        self.counters = counters_of(self.context.device)

    def enter(self, phase: str) -> float:
        """Begin a phase; return the start time to pass to `leave`."""
        self.phase = phase
        self.report_progress(None)
        return time.monotonic()

    def leave(self, began: float) -> None:
        """End the phase that started at `began`."""
        self.phase_seconds[self.phase] = self.phase_seconds.get(self.phase, 0.0) + time.monotonic() - began

    def split_from_warmup(self, phase: str, seconds: float) -> None:
        """Move `seconds` of the warm-up to a separate phase."""
        if seconds > 0.0:
            self.phase_seconds[phase] = seconds
            self.phase_seconds["warmup"] = max(self.phase_seconds["warmup"] - seconds, 0.0)

    def report_progress(self, rate: float | None) -> None:
        """Report progress. The receiver on this rank decides whether to forward it."""
        self.progress(Progress(attempt=self.request.attempt, phase=self.phase, step=self.step, samples_per_second=rate))


def is_enough(trial: Trial, seconds: list[float], spent: float) -> bool:
    """Whether the interval is narrow enough, the budget spent, or the race lost.

    All ranks have the same `seconds` and the budget is compared with their sum, so all ranks stop together.
    """
    fidelity = trial.request.fidelity
    if len(seconds) < fidelity.min_steps:
        return False
    lost = trial.race is not None and trial.race.is_lost(seconds)
    return lost or spent > fidelity.max_seconds or _narrow(seconds, fidelity.target_relative_half_width)


def _narrow(seconds: list[float], target: float) -> bool:
    return len(seconds) >= MIN_STEPS_FOR_INTERVAL and 0.0 <= step_time(seconds).relative_half_width <= target


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The timed steps of a trial."""

    seconds: list[float]
    costs: Costs
    resident_set: int
    settled: bool
    clocks: ClockState
    """The device while these steps ran."""
    line: Line | None = None
    """The line by which `seconds` are extrapolated; None: they are those of full steps."""
    lost: Interval | None = None
    """The rate with which the trial lost its race, with its bound; None: it did not lose."""
    timed: bool = True
    """False if the race was lost in warm-up; `seconds` are then those of warm-up steps."""
