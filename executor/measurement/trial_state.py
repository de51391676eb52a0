"""The state of a running trial: its progress reports, and when it can no longer win."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from executor.engine import RankContext
from executor.measurement.device import ClockState, DeviceCounters, counters_of
from executor.measurement.fewer import Line, line_of
from executor.measurement.meter import Costs
from executor.measurement.timing import MIN_STEPS_FOR_INTERVAL, step_time, t_quantile
from search_spaces.training.data_schedule import useful_samples
from search_spaces.trial import Interval, Progress, TrialRequest

CONFIDENCE = 0.99
"""One-sided: of trials whose configuration is as fast as the best, at most one in a hundred may be ended early."""
PER_LOOK = 0.999
"""The same for the trial's own steps. It is stricter because they are tested again after every step."""
LEAST_CORRELATION = 0.5
"""Lower bound for the correlation of neighbouring steps. A few steps do not suffice to estimate it, and a busy machine stays
busy for more than one step."""
FEWEST_WARM_UP_STEPS = 4
"""Steps that must all be hopeless before a trial ends in warm-up."""
HOPELESS = 3.0
"""Factor by which a warm-up step must be too slow. First steps take longer because of set-up, look-ups and counting, but
set-up does not explain four steps in a row that are all more than three times slower than the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Compares a trial with the best rate so far. All ranks see the same step times, so all decide alike."""

    samples: float
    """Samples of one optimizer step, as rates count them (`useful_samples`)."""
    rate_to_beat: float
    spread: float
    """Relative standard deviation of the measured ratio of two equally fast configurations, beyond the trial's own error."""
    degrees_of_freedom: int
    warmup_steps: int | None = 0
    """Warm-up steps that are ignored; None: all."""

    def interval(self, seconds: Sequence[float]) -> Interval:
        """Estimate the configuration's rate from these steps, for comparison with the best rate; `high` is the upper bound.

        The bound is `rate * exp(h)`, h² = (t(0.999, n - 1) * within)² + (t(0.99, f) * spread)²: the error of the steps, and the
        difference between repetitions of either configuration. It is on the log scale because a ratio is estimated.
        """
        timing = step_time(seconds, LEAST_CORRELATION)
        step_error = t_quantile(PER_LOOK, timing.steps - 1) * timing.relative_error
        half = math.hypot(step_error, t_quantile(CONFIDENCE, self.degrees_of_freedom) * self.spread)
        rate = self.samples / timing.mean
        return Interval(mean=rate, low=rate * math.exp(-half), high=rate * math.exp(min(half, 700.0)))

    def is_lost(self, seconds: Sequence[float]) -> bool:
        """Whether the timed steps show that the trial cannot reach the best."""
        # A mean that is not positive results from extrapolating too few steps and is meaningless.
        is_estimable = len(seconds) >= MIN_STEPS_FOR_INTERVAL and sum(seconds) > 0.0
        return is_estimable and self.interval(seconds).high < self.rate_to_beat

    def is_hopeless(self, seconds: Sequence[float]) -> bool:
        """Whether every warm-up step that counts is so slow that no timing is needed."""
        if self.warmup_steps is None or len(seconds) - self.warmup_steps < FEWEST_WARM_UP_STEPS:
            return False
        return self.hopeless_interval(seconds).high < self.rate_to_beat

    def hopeless_interval(self, seconds: Sequence[float]) -> Interval:
        """Return the rate of the fastest warm-up step that counts, with a factor `HOPELESS` in both directions."""
        rate = self.samples / min(seconds[self.warmup_steps or 0 :])
        return Interval(mean=rate, low=rate / HOPELESS, high=rate * HOPELESS)


def race_of(request: TrialRequest) -> Race | None:
    """Return the race of the request; None: the trial runs to its end."""
    if request.rate_to_beat is None:
        return None
    return Race(
        samples=useful_samples(request.config, request.workload),
        rate_to_beat=request.rate_to_beat,
        spread=request.race_spread,
        degrees_of_freedom=request.race_degrees_of_freedom,
        warmup_steps=request.race_warmup_steps,
    )


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
class TimedSteps:
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
