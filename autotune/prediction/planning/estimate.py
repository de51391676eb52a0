"""The prediction for one configuration as values: step time and its parts, memory of every pipeline rank, uncertainty."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array, Cases, scalar
from autotune.prediction.equations.memory import rank_memory, share_memory
from autotune.prediction.equations.schedules import at_point
from autotune.prediction.equations.step import StepPrediction, predict
from autotune.prediction.equations.uneven import has_explicit_layers, layout_key, layout_overrides, shares_of, tabled
from autotune.prediction.fitting.features import config_features
from autotune.prediction.fitting.residuals import ResidualProcess
from autotune.prediction.planning.memory_fit import chance_to_fit, ranks_of_node
from autotune.prediction.planning.question import Question
from executor.measurement.flops import flops_utilization
from search_spaces.models.model import FactoryModel
from search_spaces.models.pipeline import stages_of_model, stages_of_rank
from search_spaces.plain import to_plain
from search_spaces.training.adapters import configured
from search_spaces.training.data_schedule import flops_per_sample, points_of
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig

WIDENS, NOT_MODELLED = 1.0, 5.0
"""Parts of a band, relative to that of what is known best, from which they are named, and called not modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """Memory of the ranks at one pipeline position."""

    pipeline_rank: int
    layers: int
    total: float
    """Peak bytes on the device."""
    by_tag: dict[str, float]
    """The sum is the total."""
    needed: float
    """Bytes required to run, as `Memory.needed`."""
    capacity_ratio: float = 1.0
    """Memory of its device, as a multiple of the smallest's, if devices differ."""

    def document(self) -> dict[str, Any]:
        """The JSON representation."""
        return {"pipeline_rank": self.pipeline_rank, "layers": self.layers, "total": self.total, "by_tag": self.by_tag}


@dataclass(frozen=True, slots=True, kw_only=True)
class PointEstimate:
    """A point of the data schedule."""

    length: int
    """Tokens per sample."""
    kept: int
    """Those of them that layers except the first and the last process."""
    weight: float
    """Share of the run's steps that it represents."""
    step_seconds: float
    peak_memory_bytes: float
    """Of the fullest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """The estimate of one configuration. Intervals have a probability of 90 %."""

    config: TrialConfig
    step_seconds: Interval
    breakdown_seconds: dict[str, float]
    """Part of `step.PARTS` -> seconds; the sum is the mean of `step_seconds`."""
    samples_per_second: Interval
    tokens_per_second: float | None
    """None: only its factory knows the length of a module's samples."""
    tflops_per_device: float | None
    """Useful work of the model only, without recomputation; by the convention of PaLM, appendix B. None: a
    module's FLOPs are unknown."""
    mfu: float | None
    """`tflops_per_device` as a share of the peak; None: one of them is unknown."""
    ranks: tuple[RankEstimate, ...]
    """Every rank of the pipeline."""
    peak_memory_bytes: Interval
    """Of the fullest rank."""
    doubts: tuple[str, ...]
    """What makes the interval of the time wide, in clauses."""
    is_modelled: bool
    """False: the equations do not know a part of the step."""
    host_memory_bytes: float
    """Of a node's main memory, summed over its ranks."""
    memory_limit_bytes: int
    """Memory of the fullest rank's device, or its limit."""
    fit_probability: float
    """The probability that device and host memory suffice."""
    schedule: tuple[PointEstimate, ...] = ()
    """The first, a middle and the last point of a data schedule. `step_seconds` then refers to a whole step's worth of useful
    tokens, averaged over the run."""

    @property
    def token_rate(self) -> Interval | None:
        """`tokens_per_second` with its band."""
        rate, tokens = self.samples_per_second, self.tokens_per_second
        if tokens is None:
            return None
        length = tokens / rate.mean
        return Interval(mean=tokens, low=rate.low * length, high=rate.high * length)

    @property
    def fullest(self) -> RankEstimate:
        """The rank with the highest share of its device's memory."""
        return max(self.ranks, key=lambda rank: rank.total / rank.capacity_ratio)

    def document(self, every_rank: bool = True) -> dict[str, Any]:
        """The JSON representation, with the names of a best-config.json where equivalent; of every rank or the fullest."""
        return {
            "config": self.config.values(),
            "predicted": {
                "samples_per_second": to_plain(self.samples_per_second),
                "tokens_per_second": self.tokens_per_second,
                "step_seconds": self.step_seconds.mean,
                "step_seconds_band": {"low": self.step_seconds.low, "high": self.step_seconds.high},
                "breakdown_seconds": self.breakdown_seconds,
                "peak_memory_bytes": [rank.document() for rank in (self.ranks if every_rank else (self.fullest,))],
                "peak_memory_band": to_plain(self.peak_memory_bytes),
                "doubts": list(self.doubts),
                "is_modelled": self.is_modelled,
                "host_memory_bytes": self.host_memory_bytes,
                "memory_limit_bytes": self.memory_limit_bytes,
                "fit_probability": self.fit_probability,
                "tflops_per_device": self.tflops_per_device,
                "mfu": self.mfu,
                "flops_convention": "palm-appendix-b",
                "schedule": [to_plain(point) for point in self.schedule],
            },
        }


def estimates(question: Question, configs: Sequence[TrialConfig]) -> list[StepEstimate]:
    """The predictions for the configurations, in their order."""
    by_index: dict[int, StepEstimate] = {}
    for places, cases in alike(question, configs):
        prediction = predict(cases, question.rates)
        longer = learned(question, cases, [configs[index] for index in places])
        for row, index in enumerate(places):
            case = cases.take(np.array([row]))
            by_index[index] = _estimate(question, configs[index], case, prediction, row, float(longer[row]))
    return [by_index[index] for index in range(len(configs))]


def learned(question: Question, cases: Cases, configs: Sequence[TrialConfig]) -> Array:
    """(n,) Factor on the equations' step times, learned from the residuals of earlier trials on the hardware."""
    if not question.residuals:
        return np.ones(len(configs))
    factors: Array = np.exp(-ResidualProcess(question.residuals).added(config_features(cases, configs)))
    return factors


def alike(question: Question, configs: Sequence[TrialConfig]) -> Iterator[tuple[list[int], Cases]]:
    """Positions of configurations that fit into one set of cases, and these cases."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, config in enumerate(configs):
        groups.setdefault((config.precision, config.attention_backend), []).append(index)
    software = question.profile or question.engine
    for places in groups.values():
        group_configs = [configs[index] for index in places]
        yield (
            places,
            cases_of(question.model, question.cluster, question.workload, group_configs, software, question.arguments),
        )


def _estimate(
    question: Question, config: TrialConfig, cases: Cases, prediction: StepPrediction, row: int, longer: float
) -> StepEstimate:
    """`longer`: factor on the equations' step time."""
    seconds = _at(prediction.seconds, row) * longer
    fast, slow = (_at(edge, row) * longer for edge in prediction.seconds_band())
    batch, tokens = question.global_batch_size, question.tokens
    ranks = _ranks(question, config, cases)
    fullest = max(ranks, key=lambda rank: rank.total / rank.capacity_ratio)
    peak = fullest.total
    factor = math.exp(_at(prediction.memory_reach, row))
    host = _at(prediction.memory.host, row)
    flops = _flops_of_sample(question, config)
    tflops = None if flops is None else flops * batch / seconds / question.cluster.world_size / 1e12
    peak_flops = question.cluster.device.peak_flops.get(config.precision)
    return StepEstimate(
        config=config,
        step_seconds=Interval(mean=seconds, low=fast, high=slow),
        breakdown_seconds={name: _at(values, row) * longer for name, values in prediction.parts.items()},
        samples_per_second=Interval(mean=batch / seconds, low=batch / slow, high=batch / fast),
        tokens_per_second=None if isinstance(question.model, FactoryModel) else tokens / seconds,
        tflops_per_device=tflops,
        mfu=flops_utilization(tflops, peak_flops),
        ranks=ranks,
        peak_memory_bytes=Interval(mean=peak, low=peak / factor, high=peak * factor),
        doubts=tuple(name for name, terms in prediction.doubts.items() if _at(terms, row) >= WIDENS),
        is_modelled=all(_at(terms, row) < NOT_MODELLED for terms in prediction.doubts.values()),
        host_memory_bytes=host * ranks_of_node(question.cluster),
        memory_limit_bytes=round(question.cluster.device.memory_bytes * fullest.capacity_ratio),
        fit_probability=chance_to_fit(question, max(rank.needed for rank in ranks), host),
        schedule=_schedule(question, config, cases, longer),
    )


def _with_every_rank(question: Question, config: TrialConfig, cases: Cases) -> Cases:
    """The cases of one configuration with explicit layers, with all ranks in their table."""
    windows = any(kind.keys is not None for kind in cases.kinds)
    key = layout_key(config, question.shape, question.cluster, question.sequence_length, windows)
    laid_out, ranks = tabled([key], every_rank=True)
    return dataclasses.replace(cases, ranks=ranks, layouts=dataclasses.replace(cases.layouts, laid_out=laid_out))


def _flops_of_sample(question: Question, config: TrialConfig) -> float | None:
    """Useful FLOPs of a sample; None: unknown."""
    if isinstance(question.model, FactoryModel):
        assert question.model.profile is not None
        return question.model.profile.flops_per_sample(config.micro_batch_size)
    return flops_per_sample(configured(question.model, config), config, question.workload)


def _schedule(question: Question, config: TrialConfig, cases: Cases, longer: float) -> tuple[PointEstimate, ...]:
    """Time and memory at each point of one configuration's schedule; empty: nothing is scheduled."""
    points = points_of(config, question.workload)
    if len(points) == 1:
        return ()
    point_estimates = []
    for point in points:
        tokens = point.kept if config.random_ltd_start_tokens else point.length
        point_cases = at_point(cases, scalar(0 if tokens == question.sequence_length else tokens))
        at_this_point = predict(point_cases, question.rates)
        point_estimates.append(
            PointEstimate(
                length=point.length,
                kept=point.kept,
                weight=point.weight,
                step_seconds=_at(at_this_point.seconds, 0) * longer,
                peak_memory_bytes=_at(at_this_point.memory.total, 0),
            )
        )
    return tuple(point_estimates)


def _at(values: Array, row: int) -> float:
    """The value of a row; a value common to all rows is stored once."""
    return float(values[row if len(values) > 1 else 0])


def _ranks(question: Question, config: TrialConfig, cases: Cases) -> tuple[RankEstimate, ...]:
    """Memory of each pipeline rank, by its actual layers."""
    places, model = config.pipeline_parallel_size, question.model
    stage_layers = stages_of_model(model, config, question.sequence_length) if places > 1 else ()
    stages = [stages_of_rank(config, rank) for rank in range(places)] if places > 1 else [(0,)]
    layers = (
        [sum(len(stage_layers[stage]) for stage in rank_stages) for rank_stages in stages]
        if stage_layers
        else [int(cases.shapes.layers[0])]
    )
    last = len(stage_layers) - 1 if stage_layers else 0
    if has_explicit_layers(cases):
        cases = _with_every_rank(question, config, cases)
        overrides = layout_overrides(cases)
        memories = [share_memory(cases, question.rates, share, overrides) for share in shares_of(cases)]
        tags = {tag: np.array([_at(usage.by_tag[tag], 0) for usage in memories]) for tag in memories[0].by_tag}
        capacity_ratio = [_at(usage.capacity_ratio, 0) for usage in memories]
        needed: Sequence[float] = [_at(usage.needed, 0) for usage in memories]
    else:
        capacity_ratio = [1.0] * places
        memory = rank_memory(
            cases, question.rates, np.array(layers, dtype=np.float64), np.arange(places, dtype=np.float64),
            np.array([float(0 in rank_stages) for rank_stages in stages]),
            np.array([float(last in rank_stages) for rank_stages in stages]),
        )  # fmt: skip
        tags = {tag: np.broadcast_to(values, (places,)) for tag, values in memory.by_tag.items()}
        needed = [float(value) for value in np.broadcast_to(memory.needed, (places,))]
    return tuple(
        RankEstimate(
            pipeline_rank=rank,
            layers=layers[rank],
            total=float(sum(values[rank] for values in tags.values())),
            by_tag={tag: float(values[rank]) for tag, values in tags.items()},
            needed=needed[rank],
            capacity_ratio=capacity_ratio[rank],
        )
        for rank in range(places)
    )
