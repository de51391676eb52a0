"""Map configurations with equal behaviour to one: knobs without effect take their default, oversized values are clipped."""

import dataclasses
from collections.abc import Sequence

from search_spaces.capability import SpaceContext
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.trial_config import TrialConfig


def _search_order(families: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Order all knobs: each follows the knob named in its `Knob.searched_after`, else the knob declared before it.

    If the first knob of a family names none, it goes to the end.

    Knobs that a condition reads come before the knob with that condition, and knobs that share a rule are close together:
    counting stores one number for each combination of the knobs that are still to be read, so short distances keep it fast. A
    knob that is related to several otherwise unrelated knobs comes before them: if it does not vary, they remain independent.
    """
    before: dict[str, str | None] = {}
    for family in families:
        before |= {name: KNOBS[name].searched_after or last for last, name in zip((None, *family), family, strict=False)}
    order: list[str] = []
    unordered = list(before)
    while unordered:
        next_names = [name for name in unordered if before[name] is None or before[name] in order]
        if not next_names:
            raise ValueError(f"searched_after of {', '.join(unordered)} is cyclic")
        for name in next_names:
            behind = before[name]
            order.insert(len(order) if behind is None else order.index(behind) + 1, name)
        unordered = [name for name in unordered if name not in next_names]
    return tuple(order)


SEARCH_ORDER: tuple[str, ...] = _search_order(
    [[item.name for item in dataclasses.fields(family)] for family in TrialConfig.__bases__]
)
"""Every knob, in the order in which configurations are built."""


def canonical_reads(name: str) -> tuple[str, ...]:
    """Other knobs on which the canonical value of this knob depends."""
    knob = KNOBS[name]
    return (*(knob.condition.reads if knob.condition else ()), *(knob.canonical.reads if knob.canonical else ()))


def canonical_value(name: str, value: Value, config: TrialConfig, context: SpaceContext) -> Value:
    """The canonical equivalent of `value`. The knobs of `canonical_reads` must already be canonical in `config`.

    1. If the knob's condition does not hold: the default.
    2. An element size of at least the model's parameter count: the default if that is also at least the count, else the count.
       (The default is preferred because an engine that does not honour the knob still honours its default.) If the count is
       unknown, as for a user's script, nothing is clipped.
    3. The knob's own rule (`Knob.canonical`).
    """
    knob = KNOBS[name]
    if knob.condition is not None and not knob.condition.holds(config, context):
        value = knob.default
    if knob.is_element_size and int(value) >= (count := context.model.parameter_count) > 0:
        return max(int(knob.default), count)
    return value if knob.canonical is None else knob.canonical.value(value, config, context)


def canonical(config: TrialConfig, context: SpaceContext) -> TrialConfig:
    """The representative of all configurations that behave as `config` does. Idempotent."""
    for name in SEARCH_ORDER:
        value, knob = getattr(config, name), KNOBS[name]
        if value == knob.default and knob.canonical is None:
            continue  # a condition leaves it, too, and so does a parameter count
        stands_for = canonical_value(name, value, config, context)
        if stands_for != value:
            config = config.replace({name: stands_for})
    return config
