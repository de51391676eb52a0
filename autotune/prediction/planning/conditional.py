"""Predictions, plans and fits with what follows from the values that nobody stated."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from autotune.errors import NothingFeasibleError
from autotune.goodput.terms import GoodputTerms, assumed_terms
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
from autotune.prediction.planning.fit import Fit, fit, largest_model, run_amount
from autotune.prediction.planning.largest import Dimension
from autotune.prediction.planning.memory_fit import PROBABILITY, memory_limits_of
from autotune.prediction.planning.plan import PlanObjective, PlanOptions, RankedPlans, costs_of, plan
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.scan import NOT_SCANNED, Bounds
from autotune.prediction.planning.training_setups import fine_tuning
from autotune.question.assumption import LINKS, Assumption, assumed_document, assumed_lines
from autotune.question.question import PlanningFields
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.errors import SpaceTooLargeError
from search_spaces.knob import Value
from search_spaces.knob_values import value_text
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What was assumed for an answer, and what the answer is at the alternatives."""

    assumed: tuple[Assumption, ...]
    results: tuple[Consequence, ...]
    """Most consequential first."""
    without_effect: tuple[Assumption, ...] = ()
    """Further assumptions, each of a detail, whose alternatives leave the answer as it is."""

    def lines(self) -> list[str]:
        """The printed block."""
        lines = assumed_lines(self.assumed, self.results)
        words = ", ".join(item.text or item.words(item.value) for item in self.without_effect)
        return [*lines, f"  without effect on this answer: {words}"] if lines and words else lines

    def document(self) -> list[dict[str, Any]]:
        """The JSON representation."""
        return assumed_document((*self.assumed, *self.without_effect), self.results)


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
        return f"as assumed; {verdict_of(estimate)} if {words} ({estimate.fullest.needed / 2**30:.3g} GiB)"


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


def _conditions(assumed: Sequence[Assumption], results: Sequence[Consequence], decisive: Sequence[str] = ()) -> Conditions:
    telling = {*decisive, *(item.assumption.name for item in results if item.changes_answer)}
    # What has no line of its own where nothing follows from it.
    silent = tuple(
        item
        for item in assumed
        if item.name in ("reduce_dtype", "accumulation_dtype", "host_memory_bytes", "cores_per_node")
        and item.name not in telling
    )
    named = tuple(item for item in assumed if item not in silent)
    ordered = tuple(sorted(results, key=lambda item: -item.weight))
    return Conditions(assumed=named, results=ordered, without_effect=silent)


def planned(question: Question, options: PlanOptions, bounds: Bounds | None = None) -> tuple[Question, RankedPlans]:
    """`plan`, and the question that it answers: where nothing fits into memory with a sequence length that nobody stated, with
    the longest shorter alternative with which something fits.

    Raises as `plan`; where nothing fits, the message names what of it was assumed, and at which alternatives something does.
    """
    try:
        return question, plan(question, options, bounds)
    except NothingFeasibleError as error:
        if error.field != "memory":
            raise
        length = next((item for item in question.assumed if item.name == "sequence_length"), None)
        alternatives = () if length is None else length.alternatives
        shorter = [value for value in alternatives if isinstance(value, int) and value < question.sequence_length]
        for value in sorted(shorter, reverse=True):
            changed = _with_length(question, value)
            with suppress(NothingFeasibleError):
                return changed, plan(changed, options, bounds)
        lengths = f", with the assumed {question.sequence_length:,} tokens a sample" if length is not None else ""
        lengths += f", and nothing fits with {min(shorter):,} either" if shorter else ""
        fitting = " or ".join(_words_that_fit(question, options, bounds))
        remedy = f"something fits with {fitting}, which was assumed otherwise; else {error.remedy}" if fitting else error.remedy
        raise NothingFeasibleError(error.field, f"{error.problem}{lengths}", remedy) from None


def _with_length(question: Question, value: int) -> Question:
    """The question with another assumed length; the former is an alternative then."""
    (length,) = (item for item in question.assumed if item.name == "sequence_length")
    alternatives = (*(other for other in length.alternatives if other != value), length.value)
    assumed = dataclasses.replace(length, value=value, alternatives=alternatives)
    unchanged = (item for item in question.assumed if item is not length)
    return dataclasses.replace(question, sequence_length=value, assumed=(assumed, *unchanged))


def _words_that_fit(question: Question, options: PlanOptions, bounds: Bounds | None) -> Iterator[str]:
    """Other cards or main memory than the assumed ones, as NAME=VALUE, with which something fits."""
    for item in question.assumed:
        for value in item.alternatives if item.name in ("device", "host_memory_bytes") else ():
            with suppress(NothingFeasibleError, SpaceTooLargeError):
                plan(question_with(question, {item.name: value}), options, bounds)
                yield f"{item.words(value)} ({item.stated_by})"
                break


def plan_conditions(question: Question, plans: RankedPlans, options: PlanOptions) -> Conditions:
    """What the first plan is at the alternatives, and whether another of the plans is the best there."""
    first = plans.plans[0]
    assumed = tuple(_of_part(item, question.cluster, first.cluster) for item in question.assumed)
    question = dataclasses.replace(question, cluster=first.cluster, assumed=assumed)
    results = consequences(question.assumed, first.estimate, partial(estimate_with, question, first.estimate.config))
    if options.objective is PlanObjective.THROUGHPUT:
        rivals = [item.estimate.config for item in plans.plans]
        rivals += [item.simplest.config for item in plans.plans if item.simplest is not None]
        tie, probability = 1 + plans.resolution, options.fit_probability
        results = [
            dataclasses.replace(item, choice=_choice(question, item, first.base, rivals, tie, probability)) for item in results
        ]
    terms = assumed_terms(options.goodput or GoodputTerms()) if options.objective is PlanObjective.GOODPUT else ()
    return _conditions((*assumed, *terms), results)


def _of_part(item: Assumption, cluster: ClusterSpec, part: ClusterSpec) -> Assumption:
    """What is assumed of a machine, for the devices of it that a plan uses."""
    share = part.devices_per_node / cluster.devices_per_node
    if share == 1 or item.name not in ("host_memory_bytes", "cores_per_node"):
        return item
    values = (int(value * share) for value in item.alternatives if isinstance(value, int))
    text = f"{item.text}, shared by its {cluster.devices_per_node} devices"
    return dataclasses.replace(item, value=getattr(part, item.name), alternatives=tuple(values), text=text)


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


def fitted(question: Question, inputs: PlanningFields) -> tuple[Fit, Conditions]:
    """What fits of what the fields ask, and what it hangs on: of the largest model, if they ask for that.

    Raises as `fit`, `largest_model` and `run_amount`.
    """
    methods, probability = inputs.methods, PROBABILITY if inputs.fit_probability is None else inputs.fit_probability
    question = fine_tuning(question, inputs, methods)
    if inputs.max == Dimension.MODEL:
        question = largest_model(question, probability, methods) or question
    result = fit(question, probability, methods, run_amount(question, inputs))
    return result, fit_conditions(result, methods)


def fit_conditions(result: Fit, methods: Sequence[str]) -> Conditions:
    """The fastest way that fits, at the alternatives of what was assumed."""
    question, answer = result.question, result.fastest or result.nearest
    at_alternatives: dict[int, tuple[bool, str]] = {}
    name, setups = answer.setup.name, {answer.setup.name, *result.worthwhile()}
    unused = ("cores_per_node", *(LINKS if question.cluster.world_size == 1 else ()))
    assumed = tuple(
        dataclasses.replace(item, stated_by="--host-memory") if item.name == "host_memory_bytes" else item
        for item in question.assumed
        if item.name not in unused
    )

    def estimate_at(values: Mapping[str, Value]) -> StepEstimate:
        changed = fit(question_with(question, values), result.probability, methods, among=setups)
        best = changed.fastest or changed.nearest
        at_alternatives[id(best.estimate)] = changed.fastest is not None, "" if best.setup.name == name else best.setup.name
        return best.estimate

    results = []
    for item in consequences(assumed, answer.estimate, estimate_at):
        fits, other = at_alternatives[id(item.estimate)]
        changes_verdict = fits is (result.fastest is None)
        verdict = Verdict.FITS if fits else Verdict.DOES_NOT_FIT
        results.append(dataclasses.replace(item, verdict=verdict, changes_verdict=changes_verdict, choice=other * fits))
    decisive = ("host_memory_bytes",) if any(way.lacks_host for way in result.answers) else ()
    return _conditions(assumed, results, decisive)
