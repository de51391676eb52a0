"""What a running trial knows, and its signs of life."""

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
    """What a running trial knows so far."""

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
    """Runs of a step so far whose gradients overflowed, so that it was run again."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    own_seconds: float = 0.0
    """Of the last step on this rank alone, from the moment at which all ranks began it."""
    warm_seconds: list[float] = field(default_factory=list)
    """Every full step of warm-up."""
    race: Race | None = field(init=False)
    line: Line | None = field(init=False)
    counters: DeviceCounters = field(init=False)
    """Of the rank's device."""

    def __post_init__(self) -> None:
        self.race = race_of(self.request)
        self.line = line_of(self.request)
        self.counters = counters_of(self.context.device)

    def enter(self, phase: str) -> float:
        """Begin a phase; returns what `leave` wants."""
        self.phase = phase
        self.tell(None)
        return time.monotonic()

    def leave(self, began: float) -> None:
        """End the phase that began then."""
        self.phase_seconds[self.phase] = self.phase_seconds.get(self.phase, 0.0) + time.monotonic() - began

    def set_apart(self, phase: str, seconds: float) -> None:
        """Of the warm-up so far, `seconds` went into something else, which is accounted for by itself."""
        if seconds > 0.0:
            self.phase_seconds[phase] = seconds
            self.phase_seconds["warmup"] = max(self.phase_seconds["warmup"] - seconds, 0.0)

    def tell(self, rate: float | None) -> None:
        """A sign of life. Whoever takes it on this rank decides whether it is told on."""
        self.progress(Progress(attempt=self.request.attempt, phase=self.phase, step=self.step, samples_per_second=rate))


def is_enough(trial: Trial, seconds: list[float], spent: float) -> bool:
    """Whether the interval is narrow enough, the budget spent, or the race lost.

    Every rank has the same `seconds`, and how long it took is decided by their sum, so that all ranks stop together.
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
    """By which `seconds` are extrapolated; None: they are of full steps."""
    lost: Interval | None = None
    """The rate by which the trial lost its race, with its bound; None: it did not."""
    timed: bool = True
    """Off where the race was lost in warm-up, whose steps `seconds` are then."""
