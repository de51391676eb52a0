"""A trial's result from other trials: of shallower models, of points of a data schedule, and for useful tokens."""

import dataclasses
from collections.abc import Mapping, Sequence

from executor.measurement.flops import flops_utilization, tflops_per_device
from executor.measurement.meter import Line
from executor.measurement.timing import step_time
from executor.measurement.trial_report import rate_of
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import configured
from search_spaces.training.data_schedule import SchedulePosition, points_of, useful_samples, useful_share
from search_spaces.training.fewer import LAYERS, fewer_layers
from search_spaces.trial import RankMeasurement, TrialRequest, TrialResult


def line_of_layers(request: TrialRequest) -> Line | None:
    """Return the line by which the model is extrapolated; None: the whole model is run."""
    depths = fewer_layers(request.config, request.model, request.fidelity.most_layers)
    if depths is None:
        return None
    assert isinstance(request.model, ModelSpec)
    return Line(first=depths[0], second=depths[1], full=request.model.num_layers)


def shallower(request: TrialRequest, layers: int) -> TrialRequest:
    """Return the same trial with a model of `layers` layers. It has no reference losses, as those are another model's, and no
    rate to beat."""
    assert isinstance(request.model, ModelSpec)
    return dataclasses.replace(
        request,
        model=dataclasses.replace(request.model, num_layers=layers),
        fidelity=dataclasses.replace(request.fidelity, most_layers=None, most_micro_batches=None),
        reference_losses=(),
        rate_to_beat=None,
    )


def at_full_depth(request: TrialRequest, line: Line, first: TrialResult, second: TrialResult) -> TrialResult:
    """Extrapolate the trials of both depths to the whole model; the result is the same on every rank.

    - Steps are paired in their order, so that the interval of the pairs contains both depths' errors, as amplified.
    - Parameters, states, bytes sent and FLOPs are the same for every layer, so their extrapolation is exact. For bucketed
      messages the bytes are exact and the count is rounded.
    - The peak is the maximum over several moments of a step, so its extrapolation may be too high or too low. It therefore
      counts against winning, but does not make a trial INFEASIBLE; a measured peak of either depth does.
    """
    ranks = tuple(_deep_rank(line, shallow, deep) for shallow, deep in zip(first.ranks, second.ranks, strict=True))
    pairs = zip(first.step_seconds, second.step_seconds, strict=False)
    seconds = [line.at_full(short, long) for short, long in pairs]
    timing = step_time(seconds)
    rate = rate_of(timing, useful_samples(request.config, request.workload))
    model = configured(request.model, request.config)
    tflops = tflops_per_device(model, request.workload, rate.mean, request.world_size, request.config)
    executed = _executed(line, first, second)
    hardware = None if executed is None else executed / timing.mean
    notes = [result.message for result in (first, second) if result.unstable]
    return dataclasses.replace(
        second,
        message="; ".join(
            [*notes[:1], f"time and memory extrapolated from models of {line.first} and {line.second} layers to {line.full}"]
        ),
        losses=(),
        gradient_norms=(),
        step_seconds=tuple(seconds),
        samples_per_second=rate,
        within_relative_error=timing.relative_error,
        peak_memory_bytes=max(rank.peak_memory_bytes for rank in ranks) if second.peak_memory_bytes is not None else None,
        ranks=ranks,
        tflops_per_device=tflops,
        mfu=flops_utilization(tflops, request.peak_flops_per_device),
        hardware_tflops_per_device=hardware,
        hfu=flops_utilization(hardware, request.peak_flops_per_device),
        extrapolated=(LAYERS,),
        unstable=first.unstable or second.unstable,
        phase_seconds=_sums([first.phase_seconds, second.phase_seconds]),
    )


def _deep_rank(line: Line, first: RankMeasurement, second: RankMeasurement) -> RankMeasurement:
    by_tag = line.tags_at_full(first.memory_by_tag, second.memory_by_tag)
    return dataclasses.replace(
        second,
        peak_memory_bytes=sum(by_tag.values()),
        memory_by_tag=by_tag,
        tag_peak_bytes=line.tags_at_full(first.tag_peak_bytes, second.tag_peak_bytes),
        rss_peak_bytes=line.whole_at_full(first.rss_peak_bytes, second.rss_peak_bytes),
        **{**line.costs_at_full(first, second).by_name(), "allocation_retries": second.allocation_retries},
        reserved_bytes=_known(line, first.reserved_bytes, second.reserved_bytes),
        host_memory_bytes=_known(line, first.host_memory_bytes, second.host_memory_bytes),
    )


def _known(line: Line, first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else line.whole_at_full(first, second)


def _executed(line: Line, first: TrialResult, second: TrialResult) -> float | None:
    """Return the mean 10^12 FLOPs that a rank executes in a step of the whole model; None: not counted."""
    done = [
        None if result.hardware_tflops_per_device is None or not result.step_seconds
        else result.hardware_tflops_per_device * step_time(result.step_seconds).mean
        for result in (first, second)
    ]  # fmt: skip
    return None if done[0] is None or done[1] is None else line.at_full(done[0], done[1])


def points_of_request(request: TrialRequest) -> tuple[SchedulePosition, ...]:
    """Return the points at which the schedule is measured. The last one, with whole sequences, comes first: it has the highest
    peak, and its losses are those of the job's reference. Empty: nothing is scheduled, or the trial is already at a point.
    """
    if request.workload.schedule_step is not None:
        return ()
    points = points_of(request.config, request.workload)
    return tuple(reversed(points)) if len(points) > 1 else ()


def at_point(request: TrialRequest, point: SchedulePosition) -> TrialRequest:
    """Return the same trial at a point of the schedule, without a rate to beat: that rate is the whole job's."""
    last = point.kept == request.workload.sequence_length
    return dataclasses.replace(
        request,
        workload=dataclasses.replace(request.workload, schedule_step=point.step),
        reference_losses=request.reference_losses if last else (),
        rate_to_beat=None,
    )


def over_schedule(request: TrialRequest, points: Sequence[SchedulePosition], results: Sequence[TrialResult]) -> TrialResult:
    """Combine the points' trials into the whole job's; the result is the same on every rank. The first has whole sequences.

    - A step's seconds are those of a whole step's useful tokens: the weighted mean of the points' steps, divided by the share
      of a whole step's tokens that they train on. So samples/s are useful tokens/s divided by the tokens of a whole sample, and
      are comparable with those of configurations without a schedule.
    - Steps of the points are joined in their order, so that the interval contains every point's error with its weight.
    - Memory, messages and losses are those of whole sequences, which every schedule reaches.
    """
    whole, weights = results[0], [point.weight for point in points]
    share = useful_share(request.config, request.workload)
    rows = zip(*(result.step_seconds for result in results), strict=False)
    joined = [sum(weight * values for weight, values in zip(weights, row, strict=True)) for row in rows]
    seconds = [step_total / share for step_total in joined]
    timing = step_time(seconds)
    rate = rate_of(timing, request.workload.global_batch_size)
    tflops, executed = (_mean_speed(weights, results, name) for name in ("tflops_per_device", "hardware_tflops_per_device"))
    notes = [result.message for result in results if result.message]
    return dataclasses.replace(
        whole,
        message="; ".join([*notes[:1], _schedule_text(request, points, rate.mean)]),
        step_seconds=tuple(seconds),
        samples_per_second=rate,
        within_relative_error=timing.relative_error,
        ranks=tuple(
            _scheduled_rank(weights, share, values) for values in zip(*(result.ranks for result in results), strict=True)
        ),
        tflops_per_device=tflops,
        mfu=flops_utilization(tflops, request.peak_flops_per_device),
        hardware_tflops_per_device=executed,
        hfu=flops_utilization(executed, request.peak_flops_per_device),
        unstable=any(result.unstable for result in results),
        phase_seconds=_sums([result.phase_seconds for result in results]),
    )


def of_documents(request: TrialRequest, result: TrialResult) -> TrialResult:
    """Return the figures of a trial on documents for a whole step's useful tokens, as in `over_schedule`: with packing or
    padding, samples/s are useful tokens/s divided by the tokens of a whole sample. Whole samples leave the result unchanged.
    """
    share = useful_share(request.config, request.workload)
    if not request.workload.document_lengths or not result.step_seconds:
        return result
    notes = (result.message, _useful_text(request, share, result))
    return dataclasses.replace(
        result,
        message="; ".join(note for note in notes if note),
        step_seconds=tuple(seconds / share for seconds in result.step_seconds),
        ranks=tuple(_scheduled_rank([1.0], share, [rank]) for rank in result.ranks),
    )


def _useful_text(request: TrialRequest, share: float, result: TrialResult) -> str:
    how = "packed into rows" if request.config.pack_sequences else "in rows of their own"
    rate = result.samples_per_second
    speed = "" if rate is None else f"{rate.mean * request.workload.sequence_length:,.0f} useful tokens/s, "
    return f"{speed}{share:.1%} of all: documents {how}"


def _schedule_text(request: TrialRequest, points: Sequence[SchedulePosition], rate: float) -> str:
    token_counts = ", ".join(str(point.kept) for point in reversed(points))
    subject = "samples of" if request.config.curriculum_start_length else "middle layers on"
    speed, steps = rate * request.workload.sequence_length, request.workload.training_steps
    return f"{speed:,.0f} useful tokens/s over {steps} steps, measured with {subject} {token_counts} tokens"


def _mean_speed(weights: Sequence[float], results: Sequence[TrialResult], name: str) -> float | None:
    """Return the mean FLOP/s weighted by the time of the points' steps; None if a point's are unknown."""
    means = [step_time(result.step_seconds).mean for result in results]
    speeds = [getattr(result, name) for result in results]
    if any(speed is None for speed in speeds):
        return None
    spent = [weight * mean for weight, mean in zip(weights, means, strict=True)]
    return float(sum(speed * duration for speed, duration in zip(speeds, spent, strict=True)) / sum(spent))


def _scheduled_rank(weights: Sequence[float], share: float, points: Sequence[RankMeasurement]) -> RankMeasurement:
    def mean(name: str) -> float | None:
        values = [getattr(point, name) for point in points]
        if any(value is None for value in values):
            return None
        return float(sum(weight * value for weight, value in zip(weights, values, strict=True)) / share)

    return dataclasses.replace(
        points[0],
        cpu_seconds_per_step=mean("cpu_seconds_per_step") or 0.0,
        device_seconds_per_step=mean("device_seconds_per_step"),
        compute_seconds_per_step=mean("compute_seconds_per_step"),
        wait_seconds_per_step=mean("wait_seconds_per_step"),
        compute_relative_error=None,
    )


def _sums(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for point_seconds in phases for name in point_seconds)
    return {name: sum(point_seconds.get(name, 0.0) for point_seconds in phases) for name in names}
