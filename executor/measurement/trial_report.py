"""Builds the result of a trial from its ranks' measurements."""

import socket

from executor.measurement.agreement import gather_plain
from executor.measurement.device import ClockState
from executor.measurement.environment import environment
from executor.measurement.fewer import Line
from executor.measurement.flops import convention_of, flops_utilization, hardware_tflops_per_device, tflops_per_device
from executor.measurement.memory import MemoryAccount, peak_resident_set
from executor.measurement.meter import Costs
from executor.measurement.timing import StepTime, step_time, student_t_975
from executor.measurement.trial_state import HOPELESS, TimedSteps, Trial
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.training.adapters import configured
from search_spaces.training.data_schedule import useful_samples
from search_spaces.training.fewer import MICRO_BATCHES
from search_spaces.trial import Interval, RankMeasurement, TrialResult


def window_of_warm_up(trial: Trial, clocks: ClockState) -> TimedSteps:
    """Return the window of a trial that lost its race before its steps were timed."""
    assert trial.race is not None
    return TimedSteps(
        seconds=trial.warm_seconds,
        costs=Costs(),
        resident_set=peak_resident_set(),
        settled=False,
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
        environment=environment(context.device),
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
        cpu_seconds_per_step=window.costs.cpu_seconds,
        collectives=window.costs.collectives,
        device_seconds_per_step=window.costs.device_seconds,
        reserved_bytes=trial.counters.peak_reserved_bytes(),
        non_torch_bytes=account.outside if account else trial.counters.outside_bytes(),
        allocation_retries=window.costs.retries,
        throttled=window.clocks.throttled,
        sm_clock_mhz=window.clocks.sm_clock_mhz,
        host_memory_bytes=account.host_peak if account else None,
        compute_seconds_per_step=window.costs.compute_seconds,
        wait_seconds_per_step=window.costs.wait_seconds,
        compute_relative_error=window.costs.compute_relative_error,
    )
