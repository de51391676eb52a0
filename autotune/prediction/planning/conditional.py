"""Predictions, plans and capacities with what follows from the values that nobody stated."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from autotune.errors import NothingFeasibleError
from autotune.prediction.planning.capacity import Capacity, ShardingLevels
from autotune.prediction.planning.consequences import (
    Consequence,
    Verdict,
    assumed_knobs,
    config_with,
    consequences,
    estimate_with,
    most_favourable,
    question_with,
    verdict_of,
)
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.memory_fit import memory_limits_of
from autotune.prediction.planning.plan import PlanObjective, PlanOptions, RankedPlans, costs_of, plan
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.scan import NOT_SCANNED, Bounds
from autotune.question.assumption import LINKS, Assumption, assumed_document, assumed_lines
from search_spaces.knob import Value
from search_spaces.knob_values import value_text
from search_spaces.trial_config import TrialConfig

ONLY_IF_TELLING = ("reduce_dtype", "accumulation_dtype", "host_memory_bytes")
"""What is not named where nothing follows from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What was assumed for an answer, and what the answer is at the alternatives."""

    assumed: tuple[Assumption, ...]
    results: tuple[Consequence, ...]
    """Most consequential first."""

    def lines(self) -> list[str]:
        """The printed block."""
        return assumed_lines(self.assumed, self.results)

    def document(self) -> list[dict[str, Any]]:
        """The JSON representation."""
        return assumed_document(self.assumed, self.results)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionalEstimate:
    """The prediction for the configuration of a question's pins."""

    estimate: StepEstimate
    conditions: Conditions
    most_favourable: StepEstimate
    """With the best verdict that the assumptions allow."""
    favourable_values: Mapping[str, Value]
    """The fewest values that lead to it."""

    @property
    def condition(self) -> str:
        """`as assumed; fits if activation_checkpointing=full (34 GiB)`; empty: the verdict hangs on no assumption."""
        verdict, results = verdict_of(self.estimate), self.conditions.results
        if verdict is Verdict.FITS:
            return "as assumed" if any(item.changes_verdict for item in results) else ""
        fitting = [item for item in results if verdict_of(item.estimate) is Verdict.FITS]
        if fitting:
            nearest = min(fitting, key=lambda item: item.distance)
            values, estimate = {nearest.assumption.name: nearest.value}, nearest.estimate
        elif verdict_of(self.most_favourable) is not verdict:
            values, estimate = dict(self.favourable_values), self.most_favourable
        else:
            return ""
        words = " and ".join(f"{name}={value_text(value)}" for name, value in values.items())
        return f"as assumed; {verdict_of(estimate)} if {words} ({estimate.peak_memory_bytes.mean / 2**30:.3g} GiB)"


def predicted(question: Question) -> ConditionalEstimate:
    """Predict the configuration of the pins, as assumed and at the alternatives. Raises as `Question.config`."""
    (estimate,) = estimates(question, [question.config()])
    assumed, estimate_at = (*question.assumed, *assumed_knobs(question)), partial(estimate_with, question, None)
    results = consequences(assumed, estimate, estimate_at)
    values, best = most_favourable(results, estimate, estimate_at)
    for name in sorted(values, key=lambda name: name != "precision"):
        fewer = {other: value for other, value in values.items() if other != name}
        with_fewer = estimate_at(fewer) if fewer else None
        if with_fewer is not None and verdict_of(with_fewer) is verdict_of(best):
            values, best = fewer, with_fewer
    return ConditionalEstimate(
        estimate=estimate, conditions=_conditions(assumed, results), most_favourable=best,
        favourable_values=values,
    )  # fmt: skip


def _conditions(assumed: Sequence[Assumption], results: Sequence[Consequence]) -> Conditions:
    telling = {item.assumption.name for item in results if item.changes_answer}
    named = tuple(item for item in assumed if item.name not in ONLY_IF_TELLING or item.name in telling)
    ordered = sorted((item for item in results if item.assumption in named), key=lambda item: -item.weight)
    return Conditions(assumed=named, results=tuple(ordered))


def planned(question: Question, options: PlanOptions, bounds: Bounds | None = None) -> tuple[Question, RankedPlans]:
    """`plan`, and the question that it answers: where nothing fits into memory with a sequence length that nobody stated, with
    the longest shorter alternative with which something fits.

    Raises as `plan`.
    """
    try:
        return question, plan(question, options, bounds)
    except NothingFeasibleError as error:
        length = next((item for item in question.assumed if item.name == "sequence_length"), None)
        if error.field != "memory" or length is None:
            raise
        shorter = [value for value in length.alternatives if isinstance(value, int) and value < question.sequence_length]
        for value in sorted(shorter, reverse=True):
            assumed = dataclasses.replace(
                length, value=value, alternatives=(*(other for other in length.alternatives if other != value), length.value)
            )
            others = (item for item in question.assumed if item is not length)
            changed = dataclasses.replace(question, sequence_length=value, assumed=(assumed, *others))
            try:
                return changed, plan(changed, options, bounds)
            except NothingFeasibleError:
                continue
        raise


def plan_conditions(question: Question, plans: RankedPlans, options: PlanOptions) -> Conditions:
    """What the first plan is at the alternatives, and whether another of the plans is the best there."""
    first = plans.plans[0]
    question = dataclasses.replace(question, cluster=first.cluster)
    results = consequences(question.assumed, first.estimate, partial(estimate_with, question, first.estimate.config))
    if options.objective is PlanObjective.THROUGHPUT:
        rivals = [item.estimate.config for item in plans.plans]
        rivals += [item.simplest.config for item in plans.plans if item.simplest is not None]
        tie, probability = 1 + plans.resolution, options.fit_probability
        results = [
            dataclasses.replace(item, choice=_choice(question, item, first.base, rivals, tie, probability)) for item in results
        ]
    return _conditions(question.assumed, results)


def _choice(
    question: Question, item: Consequence, base: TrialConfig, configs: Sequence[TrialConfig], tie: float, probability: float
) -> str:
    """The best of the plans at an alternative, in the knobs that are ranked; empty: the first, or a tie with it."""
    values = {item.assumption.name: item.value}
    changed = question_with(question, values)
    legal = [config for config in configs if config_with(question, config, values) is not None]
    costs = costs_of(changed, memory_limits_of(changed, probability), legal)
    fitting = {config: cost.seconds for config, cost in costs.items() if cost.fits}
    if not fitting:
        return ""
    best = min(fitting, key=lambda config: fitting[config])
    if configs[0] in fitting and fitting[configs[0]] <= fitting[best] * tie:
        return ""
    ranked = (name for name in ("zero_stage", *best.differences(base)) if name not in NOT_SCANNED)
    return " ".join(f"{name}={value_text(getattr(best, name))}" for name in dict.fromkeys(ranked))


def capacity_conditions(question: Question, result: Capacity) -> Conditions:
    """The first way that fits at other lengths of samples, if nobody stated one.

    A capacity chooses batches itself, and does not depend on links.
    """
    assumed = tuple(item for item in question.assumed if item.name not in ("global_batch_size", *LINKS))
    answer = (result.needed or result.nearest).estimate
    levels = ShardingLevels(question, result.probability)
    first_ways: dict[Value, TrialConfig | None] = {
        value: next(
            filter(None, (levels.first_way(item.level, result.micro_batch_size, value) for item in result.levels)), None
        )
        for item in assumed
        if item.name == "sequence_length"
        for value in item.alternatives
        if isinstance(value, int)
    }
    ways = {value: config or result.nearest.estimate.config for value, config in first_ways.items()}

    def estimate_at(values: Mapping[str, Value]) -> StepEstimate | None:
        (value,) = values.values()
        if (config := ways.get(value)) is None:
            return None
        return estimates(levels.question_at(config, int(value)), [config])[0]

    results = [
        dataclasses.replace(
            item, verdict=Verdict.FITS if first_ways[item.value] else Verdict.DOES_NOT_FIT, changes_rate=False,
            changes_verdict=(first_ways[item.value] is None) is (result.needed is not None),
            choice=_changes_text(item.estimate.config, answer.config) if first_ways[item.value] else "",
        )
        for item in consequences(assumed, answer, estimate_at)
    ]  # fmt: skip
    return Conditions(assumed=assumed, results=tuple(results))


def _changes_text(config: TrialConfig, other: TrialConfig) -> str:
    """The knobs in which a configuration differs from another."""
    return " ".join(f"{name}={value_text(getattr(config, name))}" for name in config.differences(other))
