"""Extrapolates the trial of a deep model from trials of two shallower ones."""

import dataclasses
from collections.abc import Mapping

from executor.measurement.fewer import Line
from executor.measurement.flops import flops_utilization, tflops_per_device
from executor.measurement.meter import Costs
from executor.measurement.timing import step_time
from executor.measurement.trial_report import rate_of
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import configured
from search_spaces.training.data_schedule import useful_samples
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
    ranks = tuple(_rank(line, shallow, deep) for shallow, deep in zip(first.ranks, second.ranks, strict=True))
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
        message="; ".join([*notes[:1], f"time and memory extrapolated {_text(line)}"]),
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
        phase_seconds=_sums(first.phase_seconds, second.phase_seconds),
    )


def _rank(line: Line, first: RankMeasurement, second: RankMeasurement) -> RankMeasurement:
    costs = line.costs_at_full(costs_of(first), costs_of(second))
    by_tag = line.tags_at_full(first.memory_by_tag, second.memory_by_tag)
    return dataclasses.replace(
        second,
        peak_memory_bytes=sum(by_tag.values()),
        memory_by_tag=by_tag,
        tag_peak_bytes=line.tags_at_full(first.tag_peak_bytes, second.tag_peak_bytes),
        rss_peak_bytes=line.whole_at_full(first.rss_peak_bytes, second.rss_peak_bytes),
        cpu_seconds_per_step=costs.cpu_seconds,
        device_seconds_per_step=costs.device_seconds,
        compute_seconds_per_step=costs.compute_seconds,
        wait_seconds_per_step=costs.wait_seconds,
        compute_relative_error=costs.compute_relative_error,
        collectives=costs.collectives,
        reserved_bytes=_known(line, first.reserved_bytes, second.reserved_bytes),
        host_memory_bytes=_known(line, first.host_memory_bytes, second.host_memory_bytes),
    )


def costs_of(rank: RankMeasurement) -> Costs:
    """Return the costs of a step on a rank."""
    return Costs(
        cpu_seconds=rank.cpu_seconds_per_step,
        device_seconds=rank.device_seconds_per_step,
        collectives=rank.collectives,
        compute_seconds=rank.compute_seconds_per_step,
        wait_seconds=rank.wait_seconds_per_step,
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


def _sums(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {phase: first.get(phase, 0.0) + second.get(phase, 0.0) for phase in (*first, *(set(second) - set(first)))}


def _text(line: Line) -> str:
    return f"from models of {line.first} and {line.second} layers to {line.full}"
