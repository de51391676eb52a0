"""Plans: the configurations of a space that are predicted best for an objective, with the reason for each knob."""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from autotune.errors import NothingFeasibleError, RequestError
from autotune.frameworks.exporters import is_lossless
from autotune.goodput.choice import RunChoice
from autotune.goodput.terms import GoodputTerms
from autotune.prediction.equations.kernels import rounding_of_step
from autotune.prediction.equations.step import predict
from autotune.prediction.planning.buckets import Tuned, in_order, tuned
from autotune.prediction.planning.estimate import StepEstimate, alike, estimates, learned
from autotune.prediction.planning.goodput_ranking import ranked_by_goodput
from autotune.prediction.planning.memory_fit import PROBABILITY, MemoryLimits, memory_limits_of
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.question_space import nothing_legal, space_of
from autotune.prediction.planning.reasons import Cost, Goal, Reason, reasons_of, single_knob_changes
from autotune.prediction.planning.scan import Bounds, require_within, scan
from autotune.prediction.planning.scan_results import Scanned, SpacePart
from autotune.prediction.planning.ties import TiedConfigs, grouped, plain_parts, resolution
from search_spaces.clusters.cluster import ClusterSpec, with_shape
from search_spaces.plain import to_plain
from search_spaces.quantities import number_text
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

SHARE = 0.8
"""Default share of the best rate that a plan of least memory must reach."""


class PlanObjective(StrEnum):
    """The objective by which plans are ranked."""

    THROUGHPUT = "throughput"
    """Highest samples/s."""
    MEMORY = "memory"
    """Lowest peak memory of any rank among plans that reach a share of the best rate."""
    COST = "cost"
    """Lowest price per token, over clusters with fewer nodes too."""
    DEVICES = "devices"
    """Fewest devices that reach a rate, over clusters with fewer nodes; then highest samples/s."""
    GOODPUT = "goodput"
    """Most tokens kept per device-hour on nodes that fail, with the best interval between checkpoints, spares and recovery."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How plans are ranked.

    Raises:
        RequestError: a field is out of range, or incompatible with the objective.
    """

    objective: PlanObjective = PlanObjective.THROUGHPUT
    top: int = 10
    """Number of plans returned."""
    fit_probability: float = PROBABILITY
    """Required probability that a plan fits."""
    share: float | None = None
    """Objective `memory`: least share of the best rate that a plan reaches; None: `SHARE`."""
    price: float | None = None
    """Price of a device-hour, in any currency; None: unknown."""
    rate: float | None = None
    """Least samples/s of a plan; None: any."""
    goodput: GoodputTerms | None = None
    """Objective `goodput`: failures, file systems and recoveries; None: the defaults."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "objective", _objective(self.objective))
        most_plans = 100
        if not 1 <= self.top <= most_plans:
            raise RequestError("top", f"{self.top} is not between 1 and {most_plans}", "give for example 10")
        for name in ("price", "rate"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise RequestError(name, f"{value} is not positive", "give a positive number")
        if self.share is not None and not 0 < self.share <= 1:
            raise RequestError("share", f"{self.share} is not in (0, 1]", f"give a share such as {SHARE}")
        if self.share is not None and self.objective is not PlanObjective.MEMORY:
            raise RequestError("share", "belongs to the objective memory", "leave it out, or choose that objective")
        if self.goodput is not None and self.objective is not PlanObjective.GOODPUT:
            raise RequestError("goodput", "belongs to the objective goodput", "leave it out, or choose that objective")
        if self.objective is PlanObjective.COST and self.price is None:
            raise RequestError("price", "is missing", "give the price of a device-hour (--price)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A configuration with its prediction: the fastest of those that tie."""

    estimate: StepEstimate
    base: TrialConfig
    """The device's defaults: what a sweep without pins measures first."""
    tied: int
    """Number of other configurations considered that tie with it."""
    ties: tuple[Tuned, ...]
    """The fastest of them."""
    simplest: Tuned | None
    """The one that an expert would try first; None: that is the plan itself."""
    cluster: ClusterSpec
    """The cluster, or some of its nodes."""
    reasons: tuple[Reason, ...]
    goal: Goal
    cost_per_million_tokens: float | None
    """Without failures. None: the price is unknown."""
    goodput: tuple[RunChoice, ...] = ()
    """Objective `goodput`: the best way to run it, then the best with each other recovery."""

    def document(self) -> dict[str, Any]:
        """The JSON representation."""
        return {
            "world_size": self.cluster.world_size,
            "nodes": self.cluster.nodes,
            **self.estimate.document(every_rank=False),
            "differences": self.estimate.config.differences(self.base),
            "tied": self.tied,
            "ties": [tie.document() for tie in self.ties],
            "simplest": None if self.simplest is None else self.simplest.document(),
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "reasons": [{**to_plain(reason), "text": reason.text(self.goal)} for reason in self.reasons],
            "goodput": [choice.document() for choice in self.goodput],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlans:
    """The plans, best first."""

    plans: tuple[RankedPlan, ...]
    configurations: int
    """Number of configurations, over all sizes of the cluster."""
    fitting: int
    """Number found to fit: those that a lower bound of their time excludes are not checked."""
    bucket_settings: int
    """Number of further predictions, with other bucket sizes."""
    world_sizes: tuple[int, ...]
    """Numbers of devices considered."""
    resolution: float
    """Relative difference of step times up to which configurations tie; 0: they are ranked by memory, which is reproducible."""
    seconds: float
    """Duration of planning."""

    def document(self) -> dict[str, Any]:
        """The JSON representation."""
        return {
            "configurations": self.configurations,
            "fitting": self.fitting,
            "bucket_settings": self.bucket_settings,
            "world_sizes": list(self.world_sizes),
            "resolution": self.resolution,
            "seconds": self.seconds,
            "plans": [plan.document() for plan in self.plans],
        }


def plan(question: Question, options: PlanOptions, bounds: Bounds | None = None) -> RankedPlans:
    """Rank the configurations of the question's space.

    1. Predict every configuration with default buckets; keep the best that fit.
    2. Set the buckets of the best 1,000, and of the best for each value of each knob, which explain the plans.
    3. Group the configurations that the equations cannot distinguish, the simplest of each group first (`ties`).
    4. Objectives that choose the size of the cluster: repeat for every power of two of nodes.

    Raises:
        NothingFeasibleError: nothing fits, or nothing reaches the rate.
        SpaceTooLargeError: the bounds are exceeded.
        RequestError, SearchSpaceError: the question cannot be resolved.
    """
    started, bounds = time.monotonic(), bounds or Bounds()
    counted = _CountedPlans()
    plans: list[RankedPlan] = []
    for part in _sizes(question, options):
        require_within(bounds, counted.configurations)
        counted.sizes.append(part.cluster.world_size)
        plans += _plans_of(part, options, bounds, counted)
        if plans and options.objective is PlanObjective.DEVICES:
            break
    if not plans:
        raise _no_plan_error(question, options, counted)
    if len(counted.sizes) > 1:
        plans.sort(key=lambda item: _sort_key(item, options))
    return RankedPlans(
        plans=tuple(plans[: options.top]),
        configurations=counted.configurations,
        fitting=counted.fitting,
        bucket_settings=counted.settings,
        world_sizes=tuple(counted.sizes),
        resolution=0.0
        if options.objective in (PlanObjective.MEMORY, PlanObjective.GOODPUT)
        else resolution(question.rates.time_spread),
        seconds=time.monotonic() - started,
    )


@dataclass(slots=True)
class _CountedPlans:
    configurations: int = 0
    fitting: int = 0
    settings: int = 0
    least: float = math.inf
    """Bytes of the configuration that needs the least."""
    fastest: float = math.inf
    """Seconds of the fastest step that fits."""
    sizes: list[int] = dataclasses.field(default_factory=list)


def _plans_of(question: Question, options: PlanOptions, bounds: Bounds, counted: _CountedPlans) -> list[RankedPlan]:
    """The best plans on one cluster."""
    space, limits = space_of(question), memory_limits_of(question, options.fit_probability)
    if space.is_empty():
        return []
    scanned = _scanned(question, space, limits, options, bounds, counted)
    by_memory = options.objective is PlanObjective.MEMORY
    contenders = [
        result.leader for values in scanned.at_best.values() for result in values.values() if result.leader is not None
    ]
    simple = [leader for leaders in scanned.apart for leader in leaders]
    leaders = tuple({leader.config: leader for leader in (*scanned.leaders, *contenders, *simple)}.values())
    best = _with_residuals(question, tuned(question, space, limits, leaders, by_memory, scanned.slowest), by_memory)
    counted.settings += sum(len(values) for item in best for values in item.settings.values())
    chosen = [item for item in best if options.rate is None or question.global_batch_size / item.seconds >= options.rate]
    if question.simple is not None:
        chosen = [item for item in chosen if is_lossless(space, question.simple, item.config)]
    choices_of: dict[TrialConfig, tuple[RunChoice, ...]] = {}
    if options.objective is PlanObjective.GOODPUT:
        ranked = ranked_by_goodput(question, chosen, options.goodput or GoodputTerms(), options.price, options.top)
        groups = [TiedConfigs(first=entry.item) for entry in ranked]
        choices_of = {entry.item.config: entry.choices for entry in ranked}
    elif by_memory:
        groups = [TiedConfigs(first=item) for item in chosen[: options.top]]
    else:
        groups = grouped(chosen, space, question.rates.time_spread, options.top)
    goal = Goal(
        by_memory=by_memory, limits=limits, limit=question.cluster.device.memory_bytes,
        resolution=resolution(question.rates.time_spread), simple=question.simple,
        on_failing_nodes=options.objective is PlanObjective.GOODPUT,
    )  # fmt: skip
    shown = [group.first for group in groups]
    costs = costs_of(
        question, limits, [config for item in shown for config in single_knob_changes(item, scanned.at_best, space)]
    )
    why = [reasons_of(item, scanned.at_best, chosen, space.context, goal, costs) for item in shown]
    predicted = estimates(question, [item.config for item in shown])
    return [
        _plan(question, space, estimate, group, reasons, goal, options, choices_of.get(estimate.config, ()))
        for estimate, group, reasons in zip(predicted, groups, why, strict=True)
    ]


def costs_of(question: Question, limits: MemoryLimits, configs: Sequence[TrialConfig]) -> dict[TrialConfig, Cost]:
    """The predicted costs of configurations."""
    unique = list(dict.fromkeys(configs))
    costs: dict[TrialConfig, Cost] = {}
    for places, cases in alike(question, unique):
        group_configs, count = [unique[index] for index in places], len(places)
        prediction, longer = predict(cases, question.rates), learned(question, cases, group_configs)
        parts = {name: np.broadcast_to(values, count) * longer for name, values in prediction.parts.items()}
        needed, host = (np.broadcast_to(usage, count) for usage in (prediction.memory.needed, prediction.memory.host))
        fits = limits.holds(needed, host)
        rounding = np.broadcast_to(rounding_of_step(cases), count)
        for row, config in enumerate(group_configs):
            row_parts = {name: float(values[row]) for name, values in parts.items()}
            costs[config] = Cost(
                parts=row_parts, needed=float(needed[row]), fits=bool(fits[row]), rounding=float(rounding[row])
            )
    return costs


def _with_residuals(question: Question, candidates: list[Tuned], by_memory: bool) -> list[Tuned]:
    """Apply the residuals of earlier trials and sort, best first: the ranking uses the values shown."""
    if not question.residuals:
        return candidates
    longer = np.ones(len(candidates))
    configs = [item.config for item in candidates]
    for places, cases in alike(question, configs):
        longer[places] = learned(question, cases, [configs[index] for index in places])
    corrected = [_scaled_time(item, factor) for item, factor in zip(candidates, longer.tolist(), strict=True)]
    return in_order(corrected, by_memory)


def _scaled_time(item: Tuned, factor: float) -> Tuned:
    settings = {
        name: {value: dataclasses.replace(setting, seconds=setting.seconds * factor) for value, setting in values.items()}
        for name, values in item.settings.items()
    }
    return dataclasses.replace(item, seconds=item.seconds * factor, settings=settings)


def _scanned(
    question: Question, space: SearchSpace, limits: MemoryLimits, options: PlanOptions, bounds: Bounds, counted: _CountedPlans
) -> Scanned:
    """Scan all configurations; for the objective memory a second time, once the best rate is known.

    The best of each plain part are kept, too: a simple configuration may tie and yet rank behind a thousand others.
    """
    remaining = bounds
    if bounds.configurations is not None:
        remaining = dataclasses.replace(bounds, configurations=max(bounds.configurations - counted.configurations, 0))
    by_memory = options.objective is PlanObjective.MEMORY
    apart = () if by_memory else tuple(SpacePart(values=values, most=40) for values in plain_parts(space))
    scanned = scan(question, space, limits, slowest=None, bounds=remaining, apart=apart)
    counted.configurations += scanned.count
    counted.fitting += scanned.fitting
    counted.least, counted.fastest = min(counted.least, scanned.least), min(counted.fastest, scanned.fastest)
    if not by_memory or not scanned.leaders:
        return scanned
    slowest = scanned.fastest / (SHARE if options.share is None else options.share)
    return scan(question, space, limits, slowest=slowest, bounds=remaining)


def _plan(
    question: Question, space: SearchSpace, estimate: StepEstimate, group: TiedConfigs, reasons: tuple[Reason, ...], goal: Goal,
    options: PlanOptions, choices: tuple[RunChoice, ...],
) -> RankedPlan:  # fmt: skip
    devices = question.cluster.world_size
    hourly, rate = None if options.price is None else options.price * devices, estimate.tokens_per_second
    return RankedPlan(
        estimate=estimate,
        base=space.base,
        tied=len(group.ties),
        ties=group.ties[:20],
        simplest=group.simplest,
        cluster=question.cluster,
        reasons=reasons,
        goal=goal,
        cost_per_million_tokens=None if hourly is None or rate is None else hourly / 3600 / rate * 1e6,
        goodput=choices,
    )


def _sort_key(item: RankedPlan, options: PlanOptions) -> tuple[float, float]:
    """Of plans on clusters of different sizes, which are joined; lower is better."""
    seconds, memory = item.estimate.step_seconds.mean, item.estimate.peak_memory_bytes.mean
    match options.objective:
        case PlanObjective.MEMORY:
            return (memory, seconds)
        case PlanObjective.COST:
            return (item.cluster.world_size * seconds, memory)
        case _:
            return (seconds, memory)


def _sizes(question: Question, options: PlanOptions) -> Iterator[Question]:
    """The question on 1, 2, 4, … and all nodes if the objective chooses the size; on parts of the node if there is only one."""
    if options.objective not in (PlanObjective.COST, PlanObjective.DEVICES):
        yield question
        return
    cluster = question.cluster
    single = cluster.nodes == 1
    whole = cluster.devices_per_node if single else cluster.nodes
    for count in sorted({*(2**power for power in range(whole.bit_length())), whole}):
        if count <= whole:
            name = f"{cluster.name.partition(':')[0]}:{count}"
            fewer = _part(cluster, count) if single else dataclasses.replace(cluster, nodes=count, name=name)
            yield dataclasses.replace(question, cluster=fewer)


def _part(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """`devices` devices of a node, with their share of its main memory and cores."""
    if devices == cluster.devices_per_node:
        return cluster
    return dataclasses.replace(
        with_shape(cluster, cluster.nodes, devices),
        host_memory_bytes=cluster.host_memory_bytes * devices // cluster.devices_per_node,
        cores_per_node=max(cluster.cores_per_node * devices // cluster.devices_per_node, 1),
    )


def _no_plan_error(question: Question, options: PlanOptions, counted: _CountedPlans) -> NothingFeasibleError | RequestError:
    """The error that explains why there is no plan."""
    if not counted.configurations:
        return nothing_legal(space_of(question))
    if counted.fitting and options.rate is not None:
        most = question.global_batch_size / counted.fastest
        problem = f"no plan reaches {options.rate:g} samples/s: the fastest is predicted to reach {number_text(most)}"
        return NothingFeasibleError("rate", problem, "lower it, or plan for a larger cluster")
    limit, host = (count / 2**30 for count in (question.cluster.device.memory_bytes, question.cluster.host_memory_bytes))
    least = f"the smallest is predicted to need {counted.least / 2**30:.3g} GiB"
    if counted.least <= memory_limits_of(question, options.fit_probability).device:
        least = f"those that do need more than the {host:,.0f} GiB of main memory of a machine"
    problem = (
        f"none of {counted.configurations:,} configurations fits into {limit:.3g} GiB a device with a probability of "
        f"{options.fit_probability:.0%}: {least}"
    )
    return NothingFeasibleError("memory", problem, "plan for more devices, a smaller model or shorter samples")


def _objective(text: str) -> PlanObjective:
    if text not in list(PlanObjective):
        raise RequestError("objective", f"{text!r} is not known", f"use one of {', '.join(PlanObjective)}")
    return PlanObjective(text)
