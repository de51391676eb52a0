"""One trial on one rank: build, warm up, account for memory, measure, agree, report."""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from executor.engine import Engine, EngineSession, RankContext, StepReport
from executor.engines.ddp.engine import DdpEngine
from executor.engines.fsdp2.engine import Fsdp2Engine
from executor.engines.native.engine import NativeEngine
from executor.errors import EngineRefusalError, MemoryLimitError, WrongResultError
from executor.measurement.agreement import gather_numbers, gather_plain
from executor.measurement.device import DeviceEvents, allocation_retries, read_device, set_expandable_segments
from executor.measurement.environment import environment
from executor.measurement.flop_counter import FlopCounter
from executor.measurement.flops import CONVENTION, flops_utilization, hardware_tflops_per_device, tflops_per_device
from executor.measurement.limits import bounded_memory
from executor.measurement.memory import MemoryAccount, account_step, peak_resident_set, reset_peak_resident_set
from executor.measurement.timing import MIN_STEPS_FOR_INTERVAL, StepTime, has_trend, step_time, student_t_975
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.trial import CollectiveCount, Interval, Progress, RankMeasurement, TrialRequest, TrialResult

ENGINES: dict[str, Engine] = {"native": NativeEngine(), "ddp": DdpEngine(), "fsdp2": Fsdp2Engine()}
REFERENCE_STEPS = 3
"""First steps whose losses are held against the job's reference."""
LOSS_BOUND = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
"""Relative difference from the reference loss beyond which a trial is WRONG: rounding stays well below, an error does not."""
COUNTED_STEP = 1
"""The warm-up step whose FLOPs are counted. Not the first, since a user's module may compile itself then, and torch.compile
passes by whatever runs under a counter."""
PROGRESS_SECONDS = 0.25
"""Least seconds between two signs of life."""


@dataclass(slots=True)
class _Trial:
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
    phase_seconds: dict[str, float] = field(default_factory=dict)
    told: float = 0.0


@dataclass(slots=True)
class _Window:
    """The timed steps of a trial."""

    seconds: list[float]
    cpu_seconds: float
    device_seconds: float | None
    retries: int | None
    resident_set: int
    collectives: tuple[CollectiveCount, ...]
    """Of one step."""
    settled: bool


def run_trial(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    """Run one trial; every rank of the gang calls it, and gets the same result.

    1. Build the model (`build`).
    2. Step until lazily made state exists, at least two updates (`warmup`); hold the first losses against the reference, and
       count the FLOPs of one of these steps, since a step that is counted takes longer.
    3. Account for the memory of an untimed step (`memory`); beyond the limit the trial ends here, before its timing costs.
    4. Step until step times show no trend, then until their interval is narrow or the budget ends (`measure`).
    5. Gather every rank's measurements.

    Raises:
        EngineRefusalError: the engine refuses the combination.
        MemoryLimitError: a rank's peak is beyond the limit; raised on every rank.
        WrongResultError: a loss or norm is not finite, or the first losses are off the reference; raised on every rank.
        FactoryError, DataError: the user's module or text cannot be used.
    """
    trial = _Trial(context, request, progress)
    engine = ENGINES.get(request.engine)
    if engine is None:
        raise EngineRefusalError("engine-known", f"there is no engine {request.engine!r}; use one of {', '.join(ENGINES)}")
    set_expandable_segments(context.device, request.config.expandable_segments)
    with bounded_memory(request.memory_limit_bytes, _build_bytes(request)):
        began = _enter(trial, "build")
        session = engine.build(context, request.model, request.config, request.workload)
        _leave(trial, began)
        try:
            return _measure(trial, session)
        finally:
            session.close()


def _measure(trial: _Trial, session: EngineSession) -> TrialResult:
    request = trial.request
    began = _enter(trial, "warmup")
    while not session.settled() or trial.step < max(request.fidelity.warmup_updates, COUNTED_STEP + 1):
        _warm_up(trial, session)
    _leave(trial, began)
    account = _account(trial, session) if request.fidelity.measure_memory else None
    began = _enter(trial, "warmup")
    settled = _settle(trial, session)
    _leave(trial, began)
    began = _enter(trial, "measure")
    window = _time_steps(trial, session, settled)
    _leave(trial, began)
    return _report(trial, window, account)


def _warm_up(trial: _Trial, session: EngineSession) -> None:
    if trial.step != COUNTED_STEP:
        _run_step(trial, session)
        return
    with FlopCounter() as counter:
        _run_step(trial, session)
    trial.flops = counter.total


def _account(trial: _Trial, session: EngineSession) -> MemoryAccount:
    """Memory of an extra step on every rank, and the verdict of the limit, the same on every rank."""
    began = _enter(trial, "memory")
    session.prepare(trial.step)
    account = account_step(session.train_step, session.tagged_storages, trial.context.device)
    limit = trial.request.memory_limit_bytes
    peaks = [int(peak) for (peak,) in gather_numbers(trial.context, [float(account.peak)])]
    if limit is not None and max(peaks) > limit:
        worst = peaks.index(max(peaks))
        raise MemoryLimitError(
            f"rank {worst} needs {max(peaks):,} bytes in a step, the limit is {limit:,}; "
            "use a smaller micro-batch, a higher ZeRO stage or activation checkpointing"
        )
    _leave(trial, began)
    return account


def _settle(trial: _Trial, session: EngineSession) -> bool:
    """Step until step times show no trend. False where the allowed steps end first."""
    seconds: list[float] = []
    while has_trend(seconds):
        if trial.step >= trial.request.fidelity.max_warmup_steps:
            return False
        seconds.append(_run_step(trial, session))
    return True


def _time_steps(trial: _Trial, session: EngineSession, settled: bool) -> _Window:
    """Step until the interval is narrow enough or the budget of steps or seconds ends."""
    fidelity, device = trial.request.fidelity, trial.context.device
    reset_peak_resident_set()
    retries, cpu, began = allocation_retries(device), time.process_time(), time.monotonic()
    events, sent = DeviceEvents(device), dict(session.collectives())
    seconds: list[float] = []
    while len(seconds) < fidelity.max_steps:
        seconds.append(_run_step(trial, session, events))
        # Every rank has the same `seconds`; how long it took is decided by their sum, so that all ranks stop together.
        spent = sum(seconds) > fidelity.max_seconds
        if len(seconds) >= fidelity.min_steps and (spent or _narrow(seconds, fidelity.target_relative_half_width)):
            break
    cpu_seconds = time.process_time() - cpu
    trial.phase_seconds["timed_steps"] = time.monotonic() - began
    more = allocation_retries(device)
    return _Window(
        seconds=seconds,
        cpu_seconds=cpu_seconds / len(seconds),
        device_seconds=events.mean(),
        retries=None if more is None or retries is None else more - retries,
        resident_set=peak_resident_set(),
        collectives=_per_step(sent, session.collectives(), len(seconds)),
        settled=settled,
    )


def _per_step(
    before: Mapping[tuple[str, str], tuple[int, int]], after: Mapping[tuple[str, str], tuple[int, int]], steps: int
) -> tuple[CollectiveCount, ...]:
    """Collectives of one step: every timed step sends the same."""
    found = []
    for (operation, dimension), (count, size) in sorted(after.items()):
        count_before, size_before = before.get((operation, dimension), (0, 0))
        found.append(
            CollectiveCount(
                operation=operation,
                mesh_dimension=dimension,
                count=(count - count_before) // steps,
                bytes=(size - size_before) // steps,
            )
        )
    return tuple(found)


def _narrow(seconds: list[float], target: float) -> bool:
    return len(seconds) >= MIN_STEPS_FOR_INTERVAL and step_time(seconds).relative_half_width <= target


def _run_step(trial: _Trial, session: EngineSession, events: DeviceEvents | None = None) -> float:
    """One optimizer step on every rank. Returns the slowest rank's seconds, the same on every rank."""
    session.prepare(trial.step)
    gather_numbers(trial.context, [0.0])  # a barrier: no rank's clock runs while it waits for another to get its data ready
    began = time.perf_counter()
    if events is not None:
        events.start()
    report = session.train_step()
    if events is not None:
        events.stop()
    if trial.context.device.type == "cuda":
        torch.cuda.synchronize(trial.context.device)
    seconds, loss, norm = _agree(trial.context, time.perf_counter() - began, report)
    _check_loss(trial, loss, norm)
    trial.step += 1
    _tell(trial, seconds)
    return seconds


def _agree(context: RankContext, seconds: float, report: StepReport) -> tuple[float, float, float]:
    """Slowest seconds, mean loss and gradient norm over the ranks."""
    norm = 0.0 if report.gradient_norm is None else report.gradient_norm
    # Of a pipeline, the last stage's ranks alone know the loss.
    loss, knows = (0.0, 0.0) if report.loss is None else (report.loss, 1.0)
    rows = gather_numbers(context, [seconds, loss, knows, norm])
    mean_loss = sum(row[1] for row in rows) / sum(row[2] for row in rows)
    return max(row[0] for row in rows), mean_loss, max(row[3] for row in rows)


def _check_loss(trial: _Trial, loss: float, norm: float) -> None:
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if value != value or value in (float("inf"), float("-inf")):
            raise WrongResultError(f"{name} is {value} at step {trial.step}; lower the learning rate or use a wider precision")
    if trial.step >= REFERENCE_STEPS:
        return
    trial.losses.append(loss)
    trial.norms.append(norm)
    reference = trial.request.reference_losses
    bound = LOSS_BOUND[trial.request.config.precision]
    if trial.step < len(reference) and abs(loss - reference[trial.step]) > bound * abs(reference[trial.step]):
        raise WrongResultError(
            f"loss {loss:.6g} at step {trial.step} is off the job's reference {reference[trial.step]:.6g} by more than "
            f"{bound:g} of it on the same seed and data: this configuration does not compute the same training step"
        )


def _report(trial: _Trial, window: _Window, account: MemoryAccount | None) -> TrialResult:
    request, context = trial.request, trial.context
    mine = to_plain(_rank_measurement(trial, window, account))
    ranks = tuple(from_plain(RankMeasurement, row) for row in gather_plain(context, mine))
    timing = step_time(window.seconds)
    rate = _rate(timing, request.workload.global_batch_size)
    tflops = tflops_per_device(request.model, request.workload, rate.mean, context.world_size)
    executed = hardware_tflops_per_device(gather_plain(context, trial.flops), timing.mean)
    retried = any(rank.allocation_retries for rank in ranks)
    return TrialResult(
        attempt=request.attempt,
        outcome=Outcome.OK,
        message=_message(retried, window.settled),
        losses=tuple(trial.losses),
        gradient_norms=tuple(trial.norms),
        step_seconds=tuple(window.seconds),
        samples_per_second=rate,
        within_relative_error=timing.relative_error,
        peak_memory_bytes=max(rank.peak_memory_bytes for rank in ranks) if account else None,
        ranks=ranks,
        tflops_per_device=tflops,
        mfu=flops_utilization(tflops, request.peak_flops_per_device),
        hardware_tflops_per_device=executed,
        hfu=flops_utilization(executed, request.peak_flops_per_device),
        flops_convention=CONVENTION,
        unstable=retried or not window.settled,
        phase_seconds=dict(trial.phase_seconds),
        environment=environment(context.device),
    )


def _message(retried: bool, settled: bool) -> str:
    if retried:
        return "unstable: the allocator had to flush its cache while steps were timed"
    return "" if settled else "unstable: step times still drifted when the allowed warm-up ended"


def _rate(timing: StepTime, samples: int) -> Interval:
    """Samples/s with the 95 % interval of this trial's own steps."""
    half = student_t_975(timing.steps - 1) * timing.standard_error if timing.steps > 1 else timing.mean
    slowest, fastest = timing.mean + half, max(timing.mean - half, timing.mean * 0.01)
    return Interval(mean=samples / timing.mean, low=samples / slowest, high=samples / fastest)


def _rank_measurement(trial: _Trial, window: _Window, account: MemoryAccount | None) -> RankMeasurement:
    state = read_device(trial.context.device)
    return RankMeasurement(
        rank=trial.context.rank,
        host=socket.gethostname(),
        peak_memory_bytes=account.peak if account else 0,
        memory_by_tag=account.by_tag if account else {},
        tag_peak_bytes=account.tag_peaks if account else {},
        rss_peak_bytes=window.resident_set,
        cpu_seconds_per_step=window.cpu_seconds,
        collectives=window.collectives,
        device_seconds_per_step=window.device_seconds,
        reserved_bytes=state.reserved_bytes,
        non_torch_bytes=state.non_torch_bytes,
        allocation_retries=window.retries,
        throttled=state.throttled,
        sm_clock_mhz=state.sm_clock_mhz,
        host_memory_bytes=account.host_peak if account else None,
    )


def _enter(trial: _Trial, phase: str) -> float:
    trial.phase = phase
    trial.told = 0.0
    _tell(trial, None)
    return time.monotonic()


def _leave(trial: _Trial, began: float) -> None:
    trial.phase_seconds[trial.phase] = trial.phase_seconds.get(trial.phase, 0.0) + time.monotonic() - began


def _tell(trial: _Trial, seconds: float | None) -> None:
    """A sign of life from rank 0, not more often than anybody can read."""
    now = time.monotonic()
    if trial.context.rank or now - trial.told < PROGRESS_SECONDS:
        return
    trial.told = now
    rate = trial.request.workload.global_batch_size / seconds if seconds else None
    trial.progress(Progress(attempt=trial.request.attempt, phase=trial.phase, step=trial.step, samples_per_second=rate))


def _build_bytes(request: TrialRequest) -> int:
    """The whole model in fp32 and once more: what a rank holds before it shards."""
    return 8 * request.model.parameter_count
