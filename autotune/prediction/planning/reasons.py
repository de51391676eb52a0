"""Reasons for the values of a plan, knob by knob: what each value saves or hides, and how the alternatives compare."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autotune.prediction.planning.buckets import BucketSetting, Tuned
from autotune.prediction.planning.memory_fit import MemoryLimits
from autotune.prediction.planning.scan_results import AtBest
from search_spaces.capability import SpaceContext
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, value_text
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

PARTS = {
    "compute": "compute", "tensor": "tensor, context and expert communication", "pipeline": "pipeline bubble and boundaries",
    "data": "gradient and parameter traffic", "optimizer": "optimizer update", "offload": "update and copies on the host",
}  # fmt: skip
"""Part of a step -> its name in a reason."""
HIDES = {
    "overlap_comm": "data", "overlap_param_gather": "data", "prefetch_bucket_size": "data", "reduce_bucket_size": "data",
    "allgather_bucket_size": "data", "async_tensor_parallel": "tensor", "reshard_after_forward": "data",
    "shared_expert_overlap": "tensor",
}  # fmt: skip
"""Knob -> the part of a step that its values hide behind compute, or do not."""
ALIKE = 1.001e-3
"""Relative difference that is reported as none: `buckets.WORTH`, below which the lower memory decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The criterion by which plans are compared."""

    by_memory: bool
    """True: by memory; False: by time."""
    limits: MemoryLimits
    limit: int
    """Memory of a device, or its limit, in bytes."""
    resolution: float = 0.0
    """Relative difference of step times up to which plans tie."""
    simple: str | None = None
    """The framework that must express a plan; None: any configuration is a plan."""
    on_failing_nodes: bool = False
    """Whether plans are ranked by goodput, so that a faster step may be worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another value of a knob. For a bucket: all else as in the plan. For other knobs: the best configuration with it."""

    value: Value
    step_seconds: float | None
    """None: no configuration with it qualifies as a plan."""
    peak_memory_bytes: float
    """Of the same configuration; if there is none, the least of any configuration with the value."""
    change: float | None
    """Relative difference to the plan in time or memory, depending on the goal; None: nothing with it qualifies as a plan."""
    more_memory_bytes: float
    """Additional bytes compared to the plan."""
    refused: str
    """Why nothing with it qualifies as a plan; empty: something does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The predicted cost of a configuration."""

    parts: Mapping[str, float]
    """Part of a step -> seconds."""
    needed: float
    """Bytes of the fullest rank."""
    fits: bool
    rounding: float = 0.0
    """Those of `seconds` in which operands of products are rounded to 8 bits."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The effect of the plan's value: compared to the plan with only this knob changed."""

    value: Value
    """The other value."""
    parts: Mapping[str, float]
    """Part of a step -> additional seconds with the other value."""
    needed: float
    """Bytes needed with the other value."""
    fits: bool
    rounding: float = 0.0
    """Seconds in which the other value rounds operands of products to 8 bits."""

    def text(self, knob: str) -> str:
        """`hides 0.4 s of gradient and parameter traffic behind compute`; empty: no effect to report."""
        name = value_text(self.value) or "empty"
        if not self.fits:
            return f"{name} in its place needs {_gib(self.needed)}"
        part, seconds = max(self.parts.items(), key=lambda item: item[1], default=("", 0.0))
        if seconds <= 0:
            return ""
        if HIDES.get(knob) == part:
            return f"hides {_seconds(seconds)} of {PARTS[part]} behind compute"
        costly, gained = min(self.parts.items(), key=lambda item: item[1])
        # The value's extra cost in another part, if it is at least a tenth of the saving.
        price = f" for {_seconds(-gained)} more {PARTS[costly]}" if -gained > 0.1 * seconds else ""
        if self.rounding > 0 and knob == "precision":
            price += f", whose products do not save the {_seconds(self.rounding)} that rounding to 8 bits takes"
        return f"saves {_seconds(seconds)} of {PARTS[part]} over {name} in its place{price}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The reason for one knob of a plan."""

    knob: str
    value: Value
    cause: Cause | None
    """None: no other value is possible with all else unchanged, or none is worse."""
    alternatives: tuple[Alternative, ...]
    """Nearest first; only values that are legal somewhere."""

    def matters(self, goal: Goal) -> bool:
        """Whether another value changes anything."""
        cause = self.cause is not None and bool(self.cause.text(self.knob))
        return cause or any(
            item.change is None or abs(item.change) >= ALIKE or (not goal.by_memory and _more_memory(item.more_memory_bytes))
            for item in self.alternatives
        )

    def text(self, goal: Goal, most: int | None = None) -> str:
        """One line: `overlap_comm=true: hides 0.4 s of gradient and parameter traffic behind compute; false is 11% slower`."""
        texts = [_alternative_text(item, goal) for item in self.alternatives[:most]]
        more = ["…"] if most is not None and len(self.alternatives) > most else []
        cause = self.cause.text(self.knob) if self.cause is not None and not goal.by_memory else ""
        return f"{self.knob}={value_text(self.value)}: {'; '.join([*([cause] if cause else []), *texts, *more])}"


Costs = Mapping[TrialConfig, Cost]


def single_knob_changes(plan: Tuned, at_best: Mapping[str, Mapping[Value, AtBest]], space: SearchSpace) -> list[TrialConfig]:
    """The plan, and the legal configurations that differ from it in one knob."""
    knobs = {knob: list(values) for knob, values in (*at_best.items(), *plan.settings.items())}
    changes = [(knob, value) for knob, values in knobs.items() for value in values if value != getattr(plan.config, knob)]
    changed = [plan.config.replace({knob: value}) for knob, value in changes]
    return [plan.config, *(config for config in changed if space.canonical(config) == config and not space.check(config))]


def reasons_of(
    plan: Tuned,
    at_best: Mapping[str, Mapping[Value, AtBest]],
    candidates: Sequence[Tuned],
    context: SpaceContext,
    goal: Goal,
    costs: Costs,
) -> tuple[Reason, ...]:
    """A reason for each knob that matters in the plan and has alternatives.

    Args:
        plan: the plan to explain.
        at_best: the best result for each value of each knob.
        candidates: configurations with their buckets set, including the best for each value of each knob.
        context: context of the knobs' conditions.
        goal: the criterion of comparison.
        costs: of the configurations of `single_knob_changes`.
    """
    reasons = []
    for knob, values in at_best.items():
        condition = KNOBS[knob].condition
        if condition is None or condition.holds(plan.config, context):
            reasons.append(_of_knob(knob, values, plan, candidates, goal, costs))
    reasons += [_of_bucket(knob, settings, plan, goal, costs) for knob, settings in plan.settings.items()]
    return tuple(reason for reason in reasons if reason.matters(goal))


def _of_knob(
    knob: str, values: Mapping[Value, AtBest], plan: Tuned, candidates: Sequence[Tuned], goal: Goal, costs: Costs
) -> Reason:
    best: dict[Value, Tuned] = {}
    for item in candidates:  # the best come first
        best.setdefault(getattr(item.config, knob), item)
    alternatives = [
        _alternative(value, goal, plan, best[value].seconds, best[value].memory)
        if value in best
        else _alternative(value, goal, plan, None, result.needed, result.fits)
        for value, result in values.items()
        if value != getattr(plan.config, knob)
    ]
    return _reason(knob, values, plan, costs, alternatives)


def _of_bucket(knob: str, settings: Mapping[Value, BucketSetting], plan: Tuned, goal: Goal, costs: Costs) -> Reason:
    alternatives = [
        _alternative(value, goal, plan, item.seconds if item.fits else None, item.memory)
        for value, item in settings.items()
        if value != getattr(plan.config, knob)
    ]
    return _reason(knob, settings, plan, costs, alternatives)


def _reason(knob: str, values: Iterable[Value], plan: Tuned, costs: Costs, alternatives: Sequence[Alternative]) -> Reason:
    return Reason(
        knob=knob, value=getattr(plan.config, knob), cause=_cause(knob, values, plan, costs),
        alternatives=tuple(sorted(alternatives, key=lambda item: (item.change is None, item.change or 0.0))),
    )  # fmt: skip


def _cause(knob: str, values: Iterable[Value], plan: Tuned, costs: Costs) -> Cause | None:
    """The effect of another value in its place.

    1. A faster value that does not fit: the plan's value saves memory.
    2. Else the least slower value that fits.
    3. Else one that does not fit. Of several that do not, the one that needs the least.
    """
    plan_cost, chosen = costs[plan.config], getattr(plan.config, knob)
    all_costs = {value: costs.get(plan.config.replace({knob: value})) for value in values if value != chosen}
    by_value = {value: cost for value, cost in all_costs.items() if cost is not None}
    tight = {value: cost for value, cost in by_value.items() if not cost.fits}
    slower = {value: cost for value, cost in by_value.items() if cost.fits and cost.seconds > plan_cost.seconds * (1 + ALIKE)}
    faster = {value: cost for value, cost in tight.items() if cost.seconds < plan_cost.seconds}
    for chosen_from in (faster, slower, tight):
        if chosen_from:
            value, cost = min(chosen_from.items(), key=lambda item: item[1].seconds if item[1].fits else item[1].needed)
            beyond = {name: seconds - plan_cost.parts[name] for name, seconds in cost.parts.items()}
            return Cause(value=value, parts=beyond, needed=cost.needed, fits=cost.fits, rounding=cost.rounding)
    return None


def _alternative(
    value: Value, goal: Goal, plan: Tuned, seconds: float | None, memory: float, fits: bool = False
) -> Alternative:
    """`seconds`: None: nothing with the value qualifies, because it needs too much of the device, comes too close to its limit,
    needs too much of the host, or (`fits`) is too slow or not expressed."""
    change, refused = None, ""
    if seconds is not None:
        change = memory / plan.memory - 1 if goal.by_memory else seconds / plan.seconds - 1
    elif fits:
        refused = "is too slow" if goal.simple is None else f"is in no good plan that {goal.simple} expresses"
    elif memory > goal.limit:
        refused = f"needs {_gib(memory)}"
    elif memory > goal.limits.device:
        refused = f"needs {_gib(memory)}, too near to {_gib(goal.limit)}"
    else:
        refused = "needs too much main memory"
    return Alternative(
        value=value, step_seconds=seconds, peak_memory_bytes=memory, change=change, more_memory_bytes=memory - plan.memory,
        refused=refused,
    )  # fmt: skip


def _alternative_text(item: Alternative, goal: Goal) -> str:
    name = value_text(item.value) or "empty"
    if item.change is None:
        return f"{name} {item.refused}"
    if abs(item.change) < ALIKE:
        return f"{name} is as good" if goal.by_memory else f"{name} is as fast{_more_memory(item.more_memory_bytes)}"
    tie = ", a tie" if not goal.by_memory and -goal.resolution <= item.change <= goal.resolution else ""
    share = f"{abs(item.change):.1%}" if abs(item.change) < 0.1 else f"{abs(item.change):.0%}"
    if goal.by_memory:
        return f"{name} needs {share} {'more' if item.change > 0 else 'less'}"
    before_failures = " without failures" if goal.on_failing_nodes else ""
    return f"{name} is {share} {'slower' if item.change > 0 else 'faster'}{before_failures}{tie}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _more_memory(count: float) -> str:
    if abs(count) < 0.05 * 2**30:
        return ""
    return f" with {_gib(abs(count))} {'more' if count > 0 else 'less'}"


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"
