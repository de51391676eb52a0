"""Runs one trial on one rank: build, warm up, account for memory, measure, exchange, report."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from executor.engine import Engine, EngineSession, RankContext, StepReport, measured_config
from executor.engines.capabilities import COMMAND
from executor.engines.command.trial import run_script
from executor.engines.deepspeed.engine import DeepSpeedEngine
from executor.engines.native.engine import NativeEngine
from executor.engines.torch_engines import DdpEngine, Fsdp2Engine
from executor.errors import EngineRefusalError, MemoryLimitError, RunnerError, WrongResultError
from executor.measurement.device import ClockWatch, DeviceEvents, set_expandable_segments
from executor.measurement.flop_counter import FlopCounter
from executor.measurement.memory import (
    MemoryAccount,
    account_step,
    bounded_memory,
    host_bound,
    peak_resident_set,
    reset_peak_resident_set,
)
from executor.measurement.meter import Line, Meter, OwnTime, trace_steps
from executor.measurement.timeline import step_profile
from executor.measurement.timing import has_trend, steady_steps
from executor.measurement.trial_report import (
    TimedSteps,
    Trial,
    gather_numbers,
    gather_plain,
    is_enough,
    report,
    window_of_warm_up,
)
from executor.trial.extrapolation import (
    at_full_depth,
    at_point,
    line_of_layers,
    of_documents,
    over_schedule,
    points_of_request,
    shallower,
)
from executor.trial.process import bound_to_node, collect_at, collected_by_steps
from executor.trial.reference import plain_losses
from search_spaces.knob import segments_may_grow
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain, to_plain
from search_spaces.plugins import PluginGroup, load_plugins
from search_spaces.training.data_schedule import useful_samples
from search_spaces.trial import REFERENCE_STEPS, TRACE_FILE, Progress, StepProfile, TrialRequest, TrialResult

ENGINES: dict[str, Engine] = {
    "native": NativeEngine(),
    "ddp": DdpEngine(),
    "fsdp2": Fsdp2Engine(),
    "deepspeed": DeepSpeedEngine(),
    **{engine.capability.engine: engine for engine in load_plugins(PluginGroup.ENGINES).values()},
}
WIDE = ("fp32", "fp64")
"""Precisions whose range is not a cause of overflows."""
NARROW = re.compile(r"\b(bf16|fp16)\b")
"""Types in which a part of a module may compute though its trained parameters have a wider one."""
LOSS_BOUND = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 2e-2}
"""Relative difference from the reference loss above which a trial is WRONG. Rounding stays well below it, errors do not."""
WINDOW_SECONDS = 1.0
"""Longest window of timed steps on a device with its own clock: a trial can only end between windows."""
WINDOW_STEPS = 8
"""Most steps of a window: they bound how far the host runs ahead of the device."""
COUNTED_STEP = 1
"""The warm-up step whose FLOPs are counted, uncompiled. Not the first, in which a user's module may initialize itself."""


def run_trial(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    """Run one trial. Every rank of the gang calls this function and gets the same result.

    1. If the job has no reference yet for this division of a user's module, compute it (`plain_losses`). Then build the model
       (`build`).
    2. Step until lazily created state exists, at least two updates (`warmup`). Compare the first losses with the reference, and
       count the FLOPs of one of these steps, because counting slows a step down.
    3. Account for the memory of an untimed step (`memory`). If the limit is exceeded, the trial ends here, before timing.
    4. Step until step times show no trend, then until their interval is narrow or the budget ends (`measure`). Steps that were
       already steady count as timed. With `most_micro_batches`, only the steps of this phase have fewer micro-batches.
    5. If there is a rate to beat, end during 4 as soon as it is out of reach: PRUNED.
    6. Gather every rank's measurements.

    With `most_layers`, all of this is done for two shallower models, and the whole model's figures are extrapolated. With
    scheduled data, all of it is done at each point of the schedule, and the whole job's figures are derived (`over_schedule`).
    If samples contain padding, the figures are those of a whole step's useful tokens (`of_documents`).
    A user's script (engine `command`) has no session: it runs unchanged and reports its steps itself (`run_script`).

    Raises:
        EngineRefusalError: the engine refuses the combination.
        MemoryLimitError: a rank's peak exceeds the limit; raised on every rank.
        WrongResultError: a loss or norm is not finite, or the first losses differ from the reference; raised on every rank.
        FactoryError, DataError: the user's module or text cannot be used.
    """
    points = points_of_request(request)
    if points:
        return over_schedule(request, points, [_run(context, at_point(request, point), progress) for point in points])
    return of_documents(request, _run(context, request, progress))


def _run(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    line = line_of_layers(request)
    if line is not None:
        first, second = (_run_whole(context, shallower(request, layers), progress) for layers in (line.first, line.second))
        # If noise hides that more layers take longer, run the whole model instead.
        if line.rises(first.step_seconds, second.step_seconds):
            return at_full_depth(request, line, first, second)
    return _run_whole(context, request, progress)


def _run_whole(context: RankContext, request: TrialRequest, progress: Callable[[Progress], None]) -> TrialResult:
    trial = Trial(context, request, progress)
    if request.engine == COMMAND:
        return run_script(trial)
    engine = ENGINES.get(request.engine)
    if engine is None:
        engine_names = ", ".join((*ENGINES, COMMAND))
        raise EngineRefusalError("engine-known", f"there is no engine {request.engine!r}; use one of {engine_names}")
    if request.device_kind not in (None, context.device.type):
        raise RunnerError(
            f"device: this trial is for {request.device_kind}, and rank {context.rank} has {context.device}; "
            "start the ranks on such devices"
        )
    if request.plain_steps:
        began = trial.enter("reference")
        trial.request = replace(request, reference_losses=plain_losses(context, request))
        trial.leave(began)
    set_expandable_segments(context.device, request.config.expandable_segments and segments_may_grow(request.config))
    trial.counters.reset_peaks()
    binds = bound_to_node(context.device, request.config.numa_binding)
    with binds, bounded_memory(host_bound(context, request.memory_limit_bytes, _build_bytes(request))):
        began = trial.enter("build")
        session = engine.build(context, request.model, measured_config(request.config), request.workload)
        trial.leave(began)
        with closed_at_end(context, session), collected_by_steps(request.config.gc_interval):
            result = _measure(trial, session)
            _trace(trial, session, result)
            return _with_checkpoint(trial, session, _with_parts(trial, session, result))


def _trace(trial: Trial, session: EngineSession, result: TrialResult) -> None:
    """Write the trace of one more step, if it is requested, after everything else was measured."""
    folder = trial.request.trace_path
    if folder is not None and result.outcome is Outcome.OK:
        session.prepare(trial.step)
        trace_steps(session.train_step, trial.context.device, Path(folder) / TRACE_FILE.format(rank=trial.context.rank))


def _with_parts(trial: Trial, session: EngineSession, result: TrialResult) -> TrialResult:
    """Add what the time of more steps consists of, if it is requested, after everything else was measured."""
    count = trial.request.profiled_steps
    if not count or result.outcome is not Outcome.OK:
        return result
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        session.prepare(trial.step)
        trace_steps(session.train_step, trial.context.device, path, count)
        mine = to_plain(step_profile(path, count))
    profiles = (from_plain(StepProfile, plain) for plain in gather_plain(trial.context, mine))
    return replace(result, ranks=tuple(replace(rank, profile=its) for rank, its in zip(result.ranks, profiles, strict=True)))


def _with_checkpoint(trial: Trial, session: EngineSession, result: TrialResult) -> TrialResult:
    """Add the times of a checkpoint, if they are requested, after everything else was measured."""
    folder = trial.request.checkpoint_path
    if folder is None or result.outcome is not Outcome.OK or result.extrapolated:
        return result
    return replace(result, checkpoint=session.time_checkpoint(Path(folder)))


@contextmanager
def closed_at_end(context: RankContext, session: EngineSession) -> Iterator[None]:
    """Close a session at the end of the block; after a failure, once the failure has been reported."""
    try:
        yield
    except BaseException:
        context.after_failure.callback(session.close)
        raise
    session.close()


def _measure(trial: Trial, session: EngineSession) -> TrialResult:
    request = trial.request
    began = trial.enter("warmup")
    # Memory is accounted for after these updates. A user's module may use random numbers in training: its reference steps run
    # without them.
    least_updates = max(request.fidelity.warmup_updates, COUNTED_STEP + 1)
    if isinstance(request.model, FactoryModel):
        least_updates = max(least_updates, REFERENCE_STEPS)
    while not session.settled() or trial.step < least_updates:
        _warm_up(trial, session)
    session.prepare(trial.step)  # work between steps, such as capturing graphs, belongs to the warm-up
    trial.leave(began)
    account = _account(trial, session) if request.fidelity.measure_memory else None
    meter = _meter(trial, session)
    reset_peak_resident_set()
    timed = None
    with ClockWatch(trial.counters.clock) as clock:
        began = trial.enter("warmup")
        settled = _settle(trial, session, meter)
        trial.leave(began)
        trial.split_from_warmup("compile", session.compile_seconds())
        trial.split_from_warmup("capture", session.capture_seconds())
        if not _is_hopeless(trial):
            began = trial.enter("measure")
            timed = _time_steps(trial, session, meter, settled)
            trial.leave(began)
    if timed is None:
        return report(trial, window_of_warm_up(trial, clock.since(began)), account)
    return report(trial, replace(timed, clocks=clock.since(timed.began)), account)


def _meter(trial: Trial, session: EngineSession) -> Meter:
    def own() -> OwnTime:
        return OwnTime(seconds=trial.own_seconds, waited=session.waited_seconds())

    return Meter(trial.context.device, session.collectives, own)


def _warm_up(trial: Trial, session: EngineSession) -> None:
    if trial.step != COUNTED_STEP:
        _run_step(trial, session)
        return
    skipped = trial.skipped
    with FlopCounter() as counter:
        _run_step(trial, session)
    # If gradients overflowed, the step ran several times with the same products each time.
    trial.flops = None if counter.total is None else counter.total // (1 + trial.skipped - skipped)


def _account(trial: Trial, session: EngineSession) -> MemoryAccount:
    """Account for the memory of an extra step on every rank and check the limit; the outcome is the same on every rank."""
    began = trial.enter("memory")
    session.prepare(trial.step)
    account = _account_update(trial, session)
    if trial.context.shares_device:
        account = replace(account, outside=None)
    limit = trial.request.memory_limit_bytes
    # A device of that size would hold what the allocator reserves, not what tensors hold of it.
    reserved = max(trial.counters.peak_reserved_bytes() or 0, account.peak)
    rows = gather_numbers(trial.context, [float(reserved + (account.outside or 0)), float(account.outside or 0)])
    needed, outside = (int(figure) for figure in max(rows, key=lambda row: row[0]))
    if limit is not None and needed > limit:
        worst = next(rank for rank, row in enumerate(rows) if row[0] == needed)
        of_these = f", {outside:,} of them outside of torch's allocator (the context, NCCL, libraries)" if outside else ""
        raise MemoryLimitError(
            f"rank {worst} needs {needed:,} bytes in a step{of_these}, the limit is {limit:,}; "
            "use a smaller micro-batch, a higher ZeRO stage or activation checkpointing"
        )
    trial.leave(began)
    return account


def _account_update(trial: Trial, session: EngineSession) -> MemoryAccount:
    """Account for a step that updates: a step that overflowed does not reach its peak."""
    while True:
        steps: list[StepReport] = []
        account = account_step(
            lambda: steps.append(session.train_step()),  # noqa: B023
            session.tagged_storages,
            trial.context.device,
            session.private_pool(),
        )
        if not steps[0].skipped:
            return account


def _settle(trial: Trial, session: EngineSession, meter: Meter) -> bool:
    """Step until step times show no trend. Return False if the allowed steps run out first or timing is no longer needed.

    The meter keeps full steps that were already steady, so that they need not be repeated.
    """
    seconds: list[float] = []
    line = trial.line
    if line is not None:
        _run_step(trial, session, micro_batches=line.first)  # the first step with a new count initializes state for it
    while has_trend(seconds):
        if _is_hopeless(trial) or trial.step >= trial.request.fidelity.max_warmup_steps:
            meter.keep(0)
            return False
        if line is None:
            seconds.append(meter.run(lambda events: _run_step(trial, session, events)))
        else:
            seconds.append(_run_step(trial, session, micro_batches=line.second))
    # Steps that the host waited for one by one do not count in windows.
    meter.keep(0 if _has_windows(meter, session) else steady_steps(seconds))
    return True


def _is_hopeless(trial: Trial) -> bool:
    """Whether warm-up already shows that the trial cannot win. All ranks have the same step times, hence the same answer."""
    return trial.race is not None and trial.race.is_hopeless(trial.warm_seconds)


def _time_steps(trial: Trial, session: EngineSession, meter: Meter, settled: bool) -> TimedSteps:
    """Time full steps, or steps of fewer micro-batches if the request allows it and they can be extrapolated."""
    began = time.monotonic()
    timed = None if trial.line is None else _time_pairs(trial, session, trial.line)
    timed = timed or _time_full(trial, session, meter)
    trial.phase_seconds["timed_steps"] = time.monotonic() - began
    lost = trial.race.interval(timed.seconds) if trial.race is not None and trial.race.is_lost(timed.seconds) else None
    return replace(timed, settled=settled, resident_set=peak_resident_set(), lost=lost)


def _time_full(trial: Trial, session: EngineSession, meter: Meter) -> TimedSteps:
    most = trial.request.fidelity.max_steps
    while len(meter.seconds) < most and not is_enough(trial, meter.seconds, sum(meter.seconds)):
        count = 1
        if _has_windows(meter, session):  # as many steps as fit into a window, the same on every rank
            last = [*trial.warm_seconds, *meter.seconds][-1]
            count = max(1, min(int(WINDOW_SECONDS / last), WINDOW_STEPS, most - len(meter.seconds)))
        if count == 1:
            meter.run(lambda events: _run_step(trial, session, events))
        else:
            meter.run_window(lambda events: _run_window(trial, session, events, count))  # noqa: B023
    return TimedSteps(seconds=meter.seconds, costs=meter.costs(), began=meter.began)


def _has_windows(meter: Meter, session: EngineSession) -> bool:
    return meter.has_clock and session.launches_steps()


def _time_pairs(trial: Trial, session: EngineSession, line: Line) -> TimedSteps | None:
    """Extrapolate each full step from one step of each count. They alternate, so that drift affects both. None: the slope
    cannot be determined."""
    first, second = (_meter(trial, session) for _ in range(2))
    seconds: list[float] = []
    while len(seconds) < max(trial.request.fidelity.max_steps // 2, 1):
        short = first.run(lambda events: _run_step(trial, session, events, line.first))
        long = second.run(lambda events: _run_step(trial, session, events, line.second))
        seconds.append(line.at_full(short, long))
        if is_enough(trial, seconds, sum(first.seconds) + sum(second.seconds)):
            break
    if not line.rises(first.seconds, second.seconds):
        return None
    costs = line.costs_at_full(first.costs(), second.costs())
    return TimedSteps(seconds=seconds, costs=costs, began=first.began, line=line)


def _run_step(
    trial: Trial, session: EngineSession, events: DeviceEvents | None = None, micro_batches: int | None = None
) -> float:
    """Run one optimizer step on every rank, with fewer micro-batches if requested.

    If gradients overflow, the step is repeated on the same data. Its time is the sum over all runs, its losses are those of the
    run without overflow, and it counts as one step of the reference.

    Returns the slowest rank's seconds, the same on every rank.
    """
    session.prepare(trial.step, micro_batches)
    gather_numbers(trial.context, [0.0])  # a barrier: no rank's clock runs while it waits for another rank's data
    began = time.perf_counter()
    if events is not None:
        events.start()
    collect_at(trial.step, trial.request.config.gc_interval)  # timed, because it takes time in training too
    report = session.train_step()
    while report.skipped:
        trial.skipped += 1
        report = session.train_step()
    if events is None:
        trial.counters.synchronize()
    else:
        events.stop()
        events.wait()
    trial.own_seconds = time.perf_counter() - began
    ((seconds, loss, norm),) = _agree(trial.context, [trial.own_seconds], [report])
    _check_loss(trial, loss, norm, whole=micro_batches is None)
    trial.step += 1
    samples = useful_samples(trial.request.config, trial.request.workload)
    if micro_batches is not None and trial.line is not None:
        samples = samples * micro_batches / trial.line.full
    elif trial.phase == "warmup":
        trial.warm_seconds.append(seconds)
    trial.report_progress(samples / seconds)
    return seconds


def _run_window(trial: Trial, session: EngineSession, events: DeviceEvents, count: int) -> list[float]:
    """Run full steps one after the other. The host waits once, at their end, and launches a step while the device runs earlier
    ones, as in training. The device's own clock measures each step.

    Returns the slowest rank's seconds of each step, the same on every rank.
    """
    launched: list[Callable[[], StepReport]] = []
    for step in range(trial.step, trial.step + count):
        session.prepare(step)
        if not launched:
            gather_numbers(trial.context, [0.0])  # as before a single step
        events.start()
        collect_at(step, trial.request.config.gc_interval)
        launched.append(session.launch_step())
        events.stop()
    events.wait()
    step_seconds = events.last(count)
    trial.own_seconds = sum(step_seconds) / count
    agreed = _agree(trial.context, step_seconds, [read() for read in launched])
    for _, loss, norm in agreed:
        _check_loss(trial, loss, norm, whole=True)
        trial.step += 1
    seconds = [slowest for slowest, _, _ in agreed]
    trial.report_progress(useful_samples(trial.request.config, trial.request.workload) * count / sum(seconds))
    return seconds


def _agree(context: RankContext, seconds: list[float], reports: list[StepReport]) -> list[tuple[float, float, float]]:
    """Return the slowest seconds, mean loss and gradient norm over the ranks, for each step."""
    numbers: list[float] = []
    for rank_seconds, step in zip(seconds, reports, strict=True):
        norm = 0.0 if step.gradient_norm is None else step.gradient_norm
        # In a pipeline, only the last stage's ranks know the loss.
        loss, knows = (0.0, 0.0) if step.loss is None else (step.loss, 1.0)
        numbers += [rank_seconds, loss, knows, norm]
    ranks = gather_numbers(context, numbers)
    agreed = []
    for first in range(0, len(numbers), 4):
        slowest, losses, has_loss, norms = zip(*(rank[first : first + 4] for rank in ranks), strict=True)
        agreed.append((max(slowest), sum(losses) / sum(has_loss), max(norms)))
    return agreed


def _check_loss(trial: Trial, loss: float, norm: float, whole: bool) -> None:
    """Check that the values are finite and match the reference. `whole`: the step had the whole global batch; the reference has
    no losses of other steps."""
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if value != value or value in (float("inf"), float("-inf")):
            raise WrongResultError(f"{name} is {value} at step {trial.step}; {finite_remedy(trial.request, trial.step)}")
    if trial.step >= REFERENCE_STEPS or not whole:
        return
    trial.losses.append(loss)
    trial.norms.append(norm)
    reference = trial.request.reference_losses
    model, precision = trial.request.model, trial.request.config.precision
    is_narrow = isinstance(model, FactoryModel) and precision == model.precision and NARROW.search(model.other_types)
    bound = max(LOSS_BOUND[precision], LOSS_BOUND["bf16"] if is_narrow else 0.0)
    if trial.step < len(reference) and abs(loss - reference[trial.step]) > bound * abs(reference[trial.step]):
        raise WrongResultError(
            f"loss {loss:.6g} at step {trial.step} is off the job's reference {reference[trial.step]:.6g} by more than "
            f"{bound:g} of it on the same seed and data: this configuration does not compute the same training step"
        )


def finite_remedy(request: TrialRequest, step: int) -> str:
    """Return what the user can change if a step's loss is not finite. The first step does not depend on the learning rate."""
    remedies = []
    if request.config.precision not in WIDE:
        remedies.append("use --pin precision=fp32")
    if step > 0:
        remedies.append("lower lr")
    if isinstance(request.model, FactoryModel):
        remedies.append("check the module's loss and the values of its batch")
    return ", or ".join(remedies) or "the others are measured without it"


def _build_bytes(request: TrialRequest) -> int:
    """Return the bytes that a rank holds before sharding: none for our own model, because a rank builds only its share.
    DeepSpeed gets the whole model, and a user's code builds it whole: in fp32, with one further copy."""
    makes_shares = isinstance(request.model, ModelSpec) and request.engine != "deepspeed"
    return 0 if makes_shares else 8 * request.model.parameter_count
