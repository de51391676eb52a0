"""Equal behaviour, one configuration: what does not matter stands at its default, what is too large is clipped."""

import dataclasses
from collections.abc import Iterable, Sequence

from search_spaces.context import SpaceContext
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.trial_config import FAMILIES, TrialConfig


def _search_order(families: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Every knob behind the one that it names (`Knob.searched_after`), else behind the one that is declared before it.

    The first of a family that names none goes to the end.

    Knobs that a condition reads come before the knob that it stands for, and knobs that share a rule close together: counting
    remembers one number for each combination of the knobs that are still to be read, so that short distances keep it fast. A
    knob that is tied to several that have nothing else to do with each other comes before them: where it does not vary, they
    stay apart.
    """
    before: dict[str, str | None] = {}
    for family in families:
        before |= {name: KNOBS[name].searched_after or last for last, name in zip((None, *family), family, strict=False)}
    order: list[str] = []
    left = list(before)
    while left:
        placed = [name for name in left if before[name] is None or before[name] in order]
        if not placed:
            raise ValueError(f"searched_after of {', '.join(left)} leads in a circle")
        for name in placed:
            behind = before[name]
            order.insert(len(order) if behind is None else order.index(behind) + 1, name)
        left = [name for name in left if name not in placed]
    return tuple(order)


SEARCH_ORDER: tuple[str, ...] = _search_order([[item.name for item in dataclasses.fields(base)] for base in FAMILIES])
"""Every knob, in the order in which configurations are built."""


def canonical_reads(name: str) -> tuple[str, ...]:
    """The other knobs that the canonical value of a knob depends on."""
    knob = KNOBS[name]
    return (*(knob.condition.reads if knob.condition else ()), *(knob.canonical.reads if knob.canonical else ()))


def canonical_value(name: str, value: Value, config: TrialConfig, context: SpaceContext) -> Value:
    """The value that stands for `value`, given that the knobs of `canonical_reads` are canonical in `config`.

    1. Where the knob's condition does not hold: the default.
    2. Element sizes from the model's parameter count on: the default where that is one of them, else the count. (The default
       and not always the count, because an engine that does not honour the knob still honours its default.) A count that is
       not known, of a user's script, clips nothing.
    3. What the knob's own declaration says (`Knob.canonical`).
    """
    knob = KNOBS[name]
    if knob.condition is not None and not knob.condition.holds(config, context):
        value = knob.default
    if knob.is_element_size and int(value) >= (count := context.model.parameter_count) > 0:
        return max(int(knob.default), count)
    return value if knob.canonical is None else knob.canonical.value(value, config, context)


def canonical_values(name: str, domain: Iterable[Value], config: TrialConfig, context: SpaceContext) -> tuple[Value, ...]:
    """What the values of a domain stand for, each once, in the order of the domain."""
    return tuple(dict.fromkeys(canonical_value(name, value, config, context) for value in domain))


def canonical(config: TrialConfig, context: SpaceContext) -> TrialConfig:
    """The one configuration that stands for all that behave as `config` does. Idempotent."""
    for name in SEARCH_ORDER:
        value = getattr(config, name)
        stands_for = canonical_value(name, value, config, context)
        if stands_for != value:
            config = config.replace({name: stands_for})
    return config
