"""What follows for a prediction from each value that nobody stated: it is computed again at the other plausible values."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autotune.errors import AutotuneError
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.question import WORKLOAD, Question, default_batch
from autotune.question.assumption import VOCABULARY, AnswerAt, Assumption, assumption
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.errors import SearchSpaceError
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.models.model import ModelSpec
from search_spaces.spaces import settled
from search_spaces.trial_config import TrialConfig

PREDICTED_KNOBS = (
    "zero_stage",
    "micro_batch_size",
    "activation_checkpointing",
    "precision",
    "reduce_dtype",
    "accumulation_dtype",
)
"""Knobs that decide memory or rate in every run: a prediction without a value for them assumes the device's default."""


class Verdict(StrEnum):
    """Whether a configuration fits into memory."""

    FITS = "fits"
    MAY_FIT = "may fit"
    DOES_NOT_FIT = "does not fit"


def verdict_of(estimate: StepEstimate) -> Verdict:
    """The verdict of a prediction: fits and does not fit have a probability of `PROBABILITY`."""
    if estimate.fit_probability >= PROBABILITY:
        return Verdict.FITS
    return Verdict.MAY_FIT if estimate.fit_probability > 1 - PROBABILITY else Verdict.DOES_NOT_FIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence(AnswerAt):
    """The prediction at another value of what is assumed."""

    estimate: StepEstimate


EstimateAt = Callable[[Mapping[str, Value]], StepEstimate | None]
"""The prediction with other values of what is assumed, computed as the answer itself was (`estimate_with` for a question);
None: a rule refuses them."""


def consequences(assumed: Sequence[Assumption], answer: StepEstimate, estimate_at: EstimateAt) -> list[Consequence]:
    """The prediction at every alternative of every assumption, one at a time; most consequential first.

    Alternatives that the rules refuse with the rest of the configuration are left out.
    """
    results = [
        _consequence(assumption, value, estimate, answer)
        for assumption in assumed
        for value in assumption.alternatives
        if (estimate := estimate_at({assumption.name: value})) is not None
    ]
    return sorted(results, key=lambda item: -item.weight)


def most_favourable(
    results: Sequence[Consequence], answer: StepEstimate, estimate_at: EstimateAt
) -> tuple[Mapping[str, Value], StepEstimate]:
    """The values with the least memory that the assumptions allow, and the prediction with them: what does not fit with it
    certainly does not fit. No values: the answer's own are those.

    `results`: those of `consequences`.
    """
    values: dict[str, Value] = {}
    for item in sorted(results, key=lambda item: -_fullness(item.estimate)):
        if _fullness(item.estimate) < _fullness(answer):
            values[item.assumption.name] = item.value
    while values:
        if (best := estimate_at(values)) is not None:
            return values, best
        values.popitem()
    return values, answer


def _fullness(estimate: StepEstimate) -> float:
    """Needed bytes over those of the device, which may be assumed too."""
    return estimate.fullest.needed / estimate.memory_limit_bytes


def assumed_knobs(question: Question) -> tuple[Assumption, ...]:
    """The knobs without a pin that decide memory or rate in every run, for a prediction."""
    config = question.config()
    return tuple(
        assumption(name, getattr(config, name), f"--pin {name}")
        for name in PREDICTED_KNOBS
        if name not in question.pins and (name != "zero_stage" or question.cluster.world_size > 1)
    )


def estimate_with(question: Question, config: TrialConfig | None, values: Mapping[str, Value]) -> StepEstimate | None:
    """The prediction with other values of what is assumed; None: a rule refuses them.

    `config`: the configuration of the answer; None: that of the question's pins.
    """
    try:
        changed = question_with(question, values)
        changed_config = changed.config() if config is None else config_with(question, config, values)
        return None if changed_config is None else estimates(changed, [changed_config])[0]
    except (AutotuneError, SearchSpaceError):
        return None


def config_with(question: Question, config: TrialConfig, values: Mapping[str, Value]) -> TrialConfig | None:
    """The configuration with other values of what is assumed; None: a rule refuses it that did not refuse it before."""
    knobs = {name: value for name, value in values.items() if name in KNOBS}
    space = question_with(question, values).space_around(config.replace(knobs))
    changed = space.canonical(settled(space.base, space.context, knobs))
    refusals = {refusal.rule for refusal in space.check(changed)}
    if refusals and refusals - {refusal.rule for refusal in question.space_around(config).check(config)}:
        return None
    return changed


def question_with(question: Question, values: Mapping[str, Value]) -> Question:
    """The question with other values of what is assumed; a global batch that nobody stated follows the micro-batch."""
    fields: dict[str, Any] = {name: value for name, value in values.items() if name in WORKLOAD}
    if VOCABULARY in values and isinstance(question.model, ModelSpec):
        fields["model"] = dataclasses.replace(question.model, vocab_size=values[VOCABULARY])  # type: ignore[arg-type]
    of_cluster = {name: value for name, value in values.items() if name in ClusterSpec.__dataclass_fields__}
    if "device" in of_cluster:
        fields |= {"cluster": _with_cards(question, str(of_cluster.pop("device"))), "coefficients": None, "residuals": ()}
    if of_cluster:
        fields["cluster"] = dataclasses.replace(fields.get("cluster", question.cluster), **of_cluster)
    if knobs := {name: value for name, value in values.items() if name in KNOBS}:
        fields["pins"] = {**question.pins, **{name: (value,) for name, value in knobs.items()}}
        if any(item.name == "global_batch_size" for item in question.assumed) and "global_batch_size" not in fields:
            fields["global_batch_size"] = default_batch(question.cluster, fields["pins"])
    return dataclasses.replace(question, **fields) if fields else question


def _with_cards(question: Question, device: str) -> ClusterSpec:
    """The machines with other cards of the same name, and what is assumed of machines with those; what was stated stays."""
    cluster = question.cluster
    memory = cluster.device.memory_bytes
    limit = memory if memory < resolve_cluster(cluster.name).device.memory_bytes else None
    machines = resolve_cluster(f"{cluster.nodes}x{cluster.devices_per_node}x{device}", None, limit)
    assumed = {"name", "device", *(item.name for item in question.assumed)} & {*ClusterSpec.__dataclass_fields__}
    return dataclasses.replace(cluster, **{name: getattr(machines, name) for name in assumed})


def _consequence(assumption: Assumption, value: Value, estimate: StepEstimate, answer: StepEstimate) -> Consequence:
    rate, answer_rate = (
        item.samples_per_second.mean if item.tokens_per_second is None else item.tokens_per_second
        for item in (estimate, answer)
    )
    low, high = (answer_rate * answer.step_seconds.mean / edge for edge in (answer.step_seconds.high, answer.step_seconds.low))
    faster = abs(math.log(rate / answer_rate))
    larger = abs(math.log(estimate.fullest.needed / answer.fullest.needed))
    return Consequence(
        assumption=assumption, value=value, estimate=estimate, verdict=verdict_of(estimate).value,
        peak_memory_bytes=estimate.fullest.needed, tokens_per_second=estimate.tokens_per_second,
        samples_per_second=estimate.samples_per_second.mean,
        changes_verdict=verdict_of(estimate) is not verdict_of(answer), changes_rate=not low <= rate <= high,
        distance=faster + larger,
    )  # fmt: skip
