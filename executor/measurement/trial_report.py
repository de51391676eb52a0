"""What ranks report of a trial: exchanges between them, progress, when the trial can no longer win, and its result."""

import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from executor.engine import RankContext
from executor.measurement.device import ClockState, DeviceCounters, counters_of, environment
from executor.measurement.flops import convention_of, flops_utilization, hardware_tflops_per_device, tflops_per_device
from executor.measurement.memory import MemoryAccount, peak_resident_set
from executor.measurement.meter import Costs, Line, line_of
from executor.measurement.timing import MIN_STEPS_FOR_INTERVAL, StepTime, step_time, student_t_975, t_quantile
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.training.adapters import configured
from search_spaces.training.data_schedule import useful_samples
from search_spaces.training.fewer import MICRO_BATCHES
from search_spaces.trial import Fidelity, Interval, Progress, RankMeasurement, TrialRequest, TrialResult

CONFIDENCE = 0.99
"""One-sided: of trials whose configuration is as fast as the best, at most one in a hundred may be ended early."""
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
    """Steps of a script before which it loses no race; None: it does not race."""

    def interval(self, seconds: Sequence[float]) -> Interval:
        """Estimate the configuration's rate from these steps, for comparison with the best rate; `high` is the upper bound.

        The bound is `rate * exp(h)`, h² = (t(0.999, n - 1) * within)² + (t(0.99, f) * spread)²: the error of the steps, and the
        difference between repetitions of either configuration. It is on the log scale because a ratio is estimated.
        """
        timing = step_time(seconds, LEAST_CORRELATION)
        # The same for the trial's own steps. It is stricter because they are tested again after every step.
        step_error = t_quantile(0.999, timing.steps - 1) * timing.relative_error
        half = math.hypot(step_error, t_quantile(CONFIDENCE, self.degrees_of_freedom) * self.spread)
        rate = self.samples / timing.mean
        return Interval(mean=rate, low=rate * math.exp(-half), high=rate * math.exp(min(half, 700.0)))

    def is_lost(self, seconds: Sequence[float]) -> bool:
        """Whether the timed steps show that the trial cannot reach the best."""
        # A mean that is not positive results from extrapolating too few steps and is meaningless.
        is_estimable = len(seconds) >= MIN_STEPS_FOR_INTERVAL and sum(seconds) > 0.0
        return is_estimable and self.interval(seconds).high < self.rate_to_beat

    def is_hopeless(self, seconds: Sequence[float]) -> bool:
        """Whether every warm-up step is so slow that no timing is needed."""
        return len(seconds) >= FEWEST_WARM_UP_STEPS and self.hopeless_interval(seconds).high < self.rate_to_beat

    def hopeless_interval(self, seconds: Sequence[float]) -> Interval:
        """Return the rate of the fastest warm-up step, with a factor `HOPELESS` in both directions."""
        rate = self.samples / min(seconds)
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
    """Whether the steps are measured, or the race is lost.

    All ranks have the same `seconds` and the budget is compared with their sum, so all ranks stop together.
    """
    is_lost = trial.race is not None and len(seconds) >= trial.request.fidelity.min_steps and trial.race.is_lost(seconds)
    return is_lost or is_measured(trial.request.fidelity, seconds, spent)


def is_measured(fidelity: Fidelity, seconds: list[float], spent: float) -> bool:
    """Whether the interval is narrow enough, or the budget is spent."""
    if len(seconds) < fidelity.min_steps:
        return False
    has_interval = len(seconds) >= MIN_STEPS_FOR_INTERVAL
    is_narrow = has_interval and 0.0 <= step_time(seconds).relative_half_width <= fidelity.target_relative_half_width
    return is_narrow or spent > fidelity.max_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """The timed steps of a trial."""

    seconds: list[float]
    costs: Costs
    began: float = 0.0
    """Start of the first step, by `time.monotonic`."""
    resident_set: int = 0
    settled: bool = False
    clocks: ClockState = field(default_factory=ClockState)
    """The device while these steps ran."""
    line: Line | None = None
    """The line by which `seconds` are extrapolated; None: they are those of full steps."""
    lost: Interval | None = None
    """The rate with which the trial lost its race, with its bound; None: it did not lose."""
    timed: bool = True
    """False if the race was lost in warm-up; `seconds` are then those of warm-up steps."""


def gather_numbers(context: RankContext, values: list[float]) -> list[list[float]]:
    """Gather every rank's values on every rank."""
    if context.control_group is None:
        return [values]
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(context.world_size)]
    dist.all_gather(rows, mine, group=context.control_group)
    return [row.tolist() for row in rows]


def gather_plain(context: RankContext, value: Any) -> list[Any]:
    """Gather every rank's plain data on every rank."""
    if context.control_group is None:
        return [value]
    rows: list[Any] = [None] * context.world_size
    dist.all_gather_object(rows, value, group=context.control_group)
    return rows


def window_of_warm_up(trial: Trial, clocks: ClockState) -> TimedSteps:
    """Return the window of a trial that lost its race before its steps were timed."""
    assert trial.race is not None
    return TimedSteps(
        seconds=trial.warm_seconds,
        costs=Costs(),
        resident_set=peak_resident_set(),
        clocks=clocks,
        lost=trial.race.hopeless_interval(trial.warm_seconds),
        timed=False,
    )


def report(trial: Trial, window: TimedSteps, account: MemoryAccount | None) -> TrialResult:
    """Gather all ranks' measurements; every rank gets the same result."""
    request, context = trial.request, trial.context
    mine = to_plain(_rank_measurement(trial, window, account))
    ranks = tuple(from_plain(RankMeasurement, row) for row in gather_plain(context, mine))
    timing = step_time(window.seconds)
    rate = window.lost or rate_of(timing, useful_samples(request.config, request.workload))
    model = configured(request.model, request.config)
    tflops = tflops_per_device(model, request.workload, rate.mean, context.world_size, request.config)
    executed = hardware_tflops_per_device(gather_plain(context, trial.flops), timing.mean)
    retried = any(rank.allocation_retries for rank in ranks)
    return TrialResult(
        attempt=request.attempt,
        outcome=Outcome.PRUNED if window.lost else Outcome.OK,
        message=_message(trial, window, retried),
        losses=tuple(trial.losses),
        gradient_norms=tuple(trial.norms),
        step_seconds=tuple(window.seconds) if window.timed else (),
        samples_per_second=rate,
        within_relative_error=timing.relative_error,
        warmup_steps=len(trial.warm_seconds) if window.settled else None,
        peak_memory_bytes=max(rank.peak_memory_bytes for rank in ranks) if account else None,
        ranks=ranks,
        tflops_per_device=tflops,
        mfu=flops_utilization(tflops, request.peak_flops_per_device),
        hardware_tflops_per_device=executed,
        hfu=flops_utilization(executed, request.peak_flops_per_device),
        flops_convention=convention_of(model),
        extrapolated=(MICRO_BATCHES,) if window.line else (),
        unstable=window.lost is None and (retried or not window.settled),
        phase_seconds=dict(trial.phase_seconds),
        environment={**environment(context.device), **window.clocks.variables()},
    )


def _message(trial: Trial, window: TimedSteps, retried: bool) -> str:
    if window.lost is not None and trial.race is not None:
        return f"{_lost_text(window)}: at most {window.lost.high:.4g} samples/s, and the best has {trial.race.rate_to_beat:.4g}"
    parts = []
    if retried:
        parts.append("unstable: the allocator had to flush its cache while steps were timed")
    elif not window.settled:
        parts.append("unstable: step times still drifted when the allowed warm-up ended")
    if window.line is not None:
        parts.append(f"time extrapolated {_line_text(window.line)}")
    return "; ".join(parts)


def _lost_text(window: TimedSteps) -> str:
    if not window.timed:
        return f"ended in warm-up, at {HOPELESS:g} times the rate of its fastest step"
    if window.line is None:
        return f"ended after {len(window.seconds)} timed steps"
    return f"ended after {len(window.seconds)} pairs of timed steps, extrapolated {_line_text(window.line)}"


def _line_text(line: Line) -> str:
    return f"from steps of {line.first} and {line.second} micro-batches to {line.full}"


def rate_of(timing: StepTime, samples: float) -> Interval:
    """Return samples/s for `samples` in a step, with the 95 % interval from this trial's own steps."""
    half = student_t_975(timing.steps - 1) * timing.standard_error if timing.steps > 1 else timing.mean
    slowest, fastest = timing.mean + half, max(timing.mean - half, timing.mean * 0.01)
    return Interval(mean=samples / timing.mean, low=samples / slowest, high=samples / fastest)


def _rank_measurement(trial: Trial, window: TimedSteps, account: MemoryAccount | None) -> RankMeasurement:
    return RankMeasurement(
        rank=trial.context.rank,
        host=socket.gethostname(),
        peak_memory_bytes=account.peak if account else 0,
        memory_by_tag=account.by_tag if account else {},
        tag_peak_bytes=account.tag_peaks if account else {},
        rss_peak_bytes=window.resident_set,
        **window.costs.by_name(),
        reserved_bytes=trial.counters.peak_reserved_bytes(),
        non_torch_bytes=account.outside if account else trial.counters.outside_bytes(),
        throttled=window.clocks.throttled,
        sm_clock_mhz=window.clocks.sm_clock_mhz,
        host_memory_bytes=account.host_peak if account else None,
    )
