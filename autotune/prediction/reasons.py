"""Why a plan has the value that it has, knob by knob: what the other values come to, from the figures of the ranking."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.prediction.buckets import Setting, Tuned
from autotune.prediction.room import Room
from autotune.prediction.scan import AtBest
from search_spaces.context import SpaceContext
from search_spaces.knobs import KNOBS, value_text
from search_spaces.trial_config import Value

ALIKE = 1.001e-3
"""Relative difference that is told as none: `buckets.WORTH`, by which less memory is chosen instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What plans are compared by."""

    by_memory: bool
    """Whether by memory; else by time."""
    room: Room
    limit: int
    """Bytes that a device has, or was limited to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another value of a knob. Of a bucket: all else as in the plan. Of any other knob: the best configuration that has it."""

    value: Value
    step_seconds: float | None
    """None: nothing with it may be a plan."""
    peak_memory_bytes: float
    """Of the same configuration; where there is none, the least that anything with it takes."""
    change: float | None
    """Of what plans are compared by (seconds, or bytes), relative to the plan; None: nothing with it may be a plan."""
    more_memory_bytes: float
    """That it takes beyond the plan."""
    refused: str
    """Why nothing with it may be a plan; empty: something may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One knob of a plan."""

    knob: str
    value: Value
    alternatives: tuple[Alternative, ...]
    """The nearest first; those that are legal somewhere."""

    def text(self, goal: Goal, most: int | None = None) -> str:
        """One line: `tensor_parallel_size=4: 8 is 11% slower; 2 needs 92 GiB`."""
        told = [_told(item, goal) for item in self.alternatives[:most]]
        more = ["…"] if most is not None and len(self.alternatives) > most else []
        return f"{self.knob}={value_text(self.value)}: {'; '.join([*told, *more])}"


def reasons_of(
    plan: Tuned, at_best: Mapping[str, Mapping[Value, AtBest]], others: Sequence[Tuned], context: SpaceContext, goal: Goal
) -> tuple[Reason, ...]:
    """A reason for each knob that matters in the plan and could have been otherwise.

    Args:
        plan: what is explained.
        at_best: what each value of each knob came to.
        others: configurations with their buckets set, the best one with each value of each knob among them.
        context: where the knobs matter.
        goal: what plans are compared by.
    """
    found = []
    for knob, values in at_best.items():
        condition = KNOBS[knob].condition
        if condition is None or condition.holds(plan.config, context):
            found.append(_of_knob(knob, values, plan, others, goal))
    found += [_of_bucket(knob, settings, plan, goal) for knob, settings in plan.settings.items()]
    return tuple(reason for reason in found if reason.alternatives)


def _of_knob(knob: str, values: Mapping[Value, AtBest], plan: Tuned, others: Sequence[Tuned], goal: Goal) -> Reason:
    chosen: Value = getattr(plan.config, knob)
    best: dict[Value, Tuned] = {}
    for item in others:  # the best come first
        best.setdefault(getattr(item.config, knob), item)
    alternatives = [
        _alternative(value, goal, plan, best[value].seconds, best[value].memory)
        if value in best
        else _none(value, goal, plan, found.needed, found.fits)
        for value, found in values.items()
        if value != chosen
    ]
    return Reason(knob=knob, value=chosen, alternatives=_in_order(alternatives))


def _of_bucket(knob: str, settings: Mapping[Value, Setting], plan: Tuned, goal: Goal) -> Reason:
    chosen: Value = getattr(plan.config, knob)
    alternatives = [
        _alternative(value, goal, plan, item.seconds, item.memory)
        if item.fits
        else _none(value, goal, plan, item.memory, False)
        for value, item in settings.items()
        if value != chosen
    ]
    return Reason(knob=knob, value=chosen, alternatives=_in_order(alternatives))


def _alternative(value: Value, goal: Goal, plan: Tuned, seconds: float, memory: float) -> Alternative:
    change = memory / plan.memory - 1 if goal.by_memory else seconds / plan.seconds - 1
    return Alternative(
        value=value,
        step_seconds=seconds,
        peak_memory_bytes=memory,
        change=change,
        more_memory_bytes=memory - plan.memory,
        refused="",
    )


def _none(value: Value, goal: Goal, plan: Tuned, needed: float, fits: bool) -> Alternative:
    """Why nothing is there: too much for the device, too near to what it has, too much for its host, or too slow."""
    if fits:
        refused = "is too slow"
    elif needed > goal.limit:
        refused = f"needs {_gib(needed)}"
    elif needed > goal.room.device:
        refused = f"needs {_gib(needed)}, too near to {_gib(goal.limit)}"
    else:
        refused = "needs too much main memory"
    return Alternative(
        value=value,
        step_seconds=None,
        peak_memory_bytes=needed,
        change=None,
        more_memory_bytes=needed - plan.memory,
        refused=refused,
    )


def _in_order(found: Sequence[Alternative]) -> tuple[Alternative, ...]:
    return tuple(sorted(found, key=lambda item: (item.change is None, item.change or 0.0)))


def _told(item: Alternative, goal: Goal) -> str:
    name = value_text(item.value) or "empty"
    if item.change is None:
        return f"{name} {item.refused}"
    if abs(item.change) < ALIKE:
        return f"{name} is as good" if goal.by_memory else f"{name} is as fast{_more_memory(item.more_memory_bytes)}"
    share = f"{abs(item.change):.1%}" if abs(item.change) < 0.1 else f"{abs(item.change):.0%}"
    if goal.by_memory:
        return f"{name} needs {share} {'more' if item.change > 0 else 'less'}"
    return f"{name} is {share} {'slower' if item.change > 0 else 'faster'}"


def _more_memory(count: float) -> str:
    if abs(count) < 0.05 * 2**30:
        return ""
    return f" with {_gib(abs(count))} {'more' if count > 0 else 'less'}"


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"
