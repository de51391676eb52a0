"""What a space holds, and what is predicted of its configurations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.client.decoding import Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What a search space holds."""

    space: str
    hash: str
    domains: Mapping[str, tuple[Any, ...]]
    raw: int
    """Points of the Cartesian product."""
    legal: int
    """Distinct legal configurations."""
    merged: int
    """Points that say the same as a legal one."""
    refused: Mapping[str, int]
    """Rule -> points that it refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A rule that refuses a configuration."""

    rule: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Whether a configuration is legal."""

    legal: bool
    config: Plain
    """In canonical form."""
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedInterval:
    """A mean, and between what the truth is nine times out of ten."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Between what the truth is nine times out of ten."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of the ranks at one place along the pipeline, in bytes."""

    pipeline_rank: int
    layers: int
    total: float
    by_tag: Mapping[str, float]
    """Sums to the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePoint:
    """A point of the schedule of the data."""

    length: int
    """Tokens of a sample."""
    kept: int
    """Of these, what layers but the first and the last see."""
    weight: float
    """Share of the run's steps that it stands for."""
    step_seconds: float
    peak_memory_bytes: float
    """Of the fullest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What is predicted of a configuration."""

    samples_per_second: PredictedInterval
    tokens_per_second: float
    step_seconds: float
    step_seconds_band: Band
    breakdown_seconds: Mapping[str, float]
    """compute, tensor, pipeline, data, optimizer, offload: they sum to `step_seconds`."""
    peak_memory_bytes: tuple[RankMemory, ...]
    """Every rank of the pipeline; of a plan the fullest alone."""
    peak_memory_band: PredictedInterval
    """Of the fullest rank."""
    host_memory_bytes: float
    """Of a node's main memory."""
    memory_limit_bytes: int
    fit_probability: float
    tflops_per_device: float
    mfu: float | None
    flops_convention: str
    schedule: tuple[SchedulePoint, ...]
    """Its first, a middle and its last point; empty: the data are not scheduled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A configuration with what is predicted of it."""

    model: str
    parameter_count: int
    cluster: str
    world_size: int
    engine: str
    global_batch_size: int
    sequence_length: int
    rests_on: str
    """In words, what the prediction rests on."""
    config: Plain
    """In canonical form."""
    predicted: Predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReason:
    """Why a knob has its value: what that does, and what the others come to."""

    knob: str
    text: str
    cause: Plain | None
    """Another value in its place alone: the seconds that each part of the step takes more, and the bytes that it needs."""
    alternatives: tuple[Plain, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTie:
    """A configuration that the predictions cannot tell from the one that is shown."""

    config: Plain
    step_seconds: float
    peak_memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One of the best configurations: the simplest of those that tie with it."""

    world_size: int
    nodes: int
    config: Plain
    differences: Plain
    """Knobs that are not at the device's defaults."""
    predicted: Predicted
    tied: int
    """Further configurations that tie with it."""
    ties: tuple[PlanTie, ...]
    """The fastest of them."""
    cost_per_million_tokens: float | None
    reasons: tuple[PlanReason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMax:
    """The largest that fits."""

    dimension: str
    """sequence_length, micro_batch_size or model."""
    value: int
    """Tokens, samples or parameters."""
    next: int | None
    """The smallest that was found not to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """What a space holds at best."""

    model: str
    parameter_count: int
    cluster: str
    engine: str
    global_batch_size: int
    sequence_length: int
    rests_on: str
    """In words, what the predictions rest on."""
    space: str
    objective: str
    max: PlanMax | None
    configurations: int
    """That were predicted."""
    fitting: int
    bucket_settings: int
    world_sizes: tuple[int, ...]
    resolution: float
    """Relative difference of step times up to which configurations tie."""
    seconds: float
    plans: tuple[Plan, ...]
    """The best first."""
