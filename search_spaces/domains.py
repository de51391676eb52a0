"""Domain expressions: the values that `powers_of_two` and the like stand for, given the knob, model and cluster."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from search_spaces.context import SpaceContext
from search_spaces.environment import ENVIRONMENT
from search_spaces.errors import KnobValueError
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, check_value, knob, parse_value
from search_spaces.knobs.conditions import PARALLEL_SIZES

Domain = tuple[Value, ...]

LARGEST_BUCKET = 1_000_000_000
"""Elements: 4 GB in fp32; more does not make a collective faster."""
SOLVED = "solved"
"""For `pipeline_layout`: even stages, and the layouts that an integer program proposes."""


def resolve_domains(written: Mapping[str, Any], context: SpaceContext) -> dict[str, Domain]:
    """Resolve the domain of each knob, written as a list of values, one value or an expression.

    Raises:
        UnknownNameError: a knob does not exist.
        KnobValueError: a value is not in its knob's domain, or there is none.
    """
    degrees = {name: _resolve(name, written[name], context, {}) for name in PARALLEL_SIZES if name in written}
    other_domains = {name: _resolve(name, value, context, degrees) for name, value in written.items() if name not in degrees}
    resolved = degrees | other_domains
    return {name: resolved[name] for name in KNOBS if name in resolved}


def parse_domain(name: str, text: str) -> Any:
    """Parse the text of a pin: an expression's name, one value, or several separated by commas.

    Raises:
        UnknownNameError: the knob does not exist.
        KnobValueError: a value is not in its domain.
    """
    if text.strip() in EXPRESSIONS:
        return text.strip()
    if name == ENVIRONMENT:  # commas belong to its values
        return (parse_value(name, text),)
    return tuple(parse_value(name, part) for part in text.split(","))


def check_domain(name: str, values: Sequence[object]) -> Domain:
    """The distinct values, converted to the knob's type.

    Raises:
        UnknownNameError: the knob does not exist.
        KnobValueError: a value is not in its domain, or there is none.
    """
    checked = tuple(dict.fromkeys(check_value(name, value) for value in values))
    if not checked:
        raise KnobValueError(name, "no value is given", "give at least one value, or leave the knob out")
    if name == ENVIRONMENT and len(checked) > 1:
        remedy = "give one, and the others as environment_settings (--environment-setting), measured only on the best layout"
        raise KnobValueError(name, f"{len(checked)} values would start processes anew for every trial", remedy)
    return checked


def _resolve(name: str, written: Any, context: SpaceContext, degrees: Mapping[str, Domain]) -> Domain:
    knob(name)
    if isinstance(written, str) and written in EXPRESSIONS:
        return check_domain(name, EXPRESSIONS[written](name, context, degrees))
    return check_domain(name, written if isinstance(written, list | tuple) else (written,))


def _powers_of_two(name: str, context: SpaceContext, degrees: Mapping[str, Domain]) -> list[Value]:
    """1, 2, 4, … up to the largest value that could be legal; preceded by 0 if 0 has a special meaning."""
    largest = _largest(name, context, degrees)
    powers: list[Value] = [2**exponent for exponent in range(max(largest, 1).bit_length())]
    return [0, *powers] if KNOBS[name].zero else powers


def _divisors(name: str, context: SpaceContext, degrees: Mapping[str, Domain]) -> list[Value]:
    """Every divisor of the largest value that could be legal."""
    largest = max(_largest(name, context, degrees), 1)
    small = [number for number in range(1, math.isqrt(largest) + 1) if largest % number == 0]
    return sorted({*small, *(largest // number for number in small)})


def _element_sizes(name: str, context: SpaceContext, _: Mapping[str, Domain]) -> list[Value]:
    """Fractions of the parameter count, to two digits, so that they differ in behaviour for models of any size."""
    count = context.model.parameter_count or LARGEST_BUCKET  # 0: unknown, as for some user scripts
    shares = {min(_two_digits(count // share), LARGEST_BUCKET) for share in (512, 64, 8)}
    zero = {0} if KNOBS[name].zero else set()
    return sorted(size for size in {*shares, *zero, min(count, LARGEST_BUCKET)} if size >= KNOBS[name].minimum)


def _all(name: str, _: SpaceContext, __: Mapping[str, Domain]) -> list[Value]:
    if not KNOBS[name].choices:
        raise KnobValueError(name, "its values cannot all be listed", "list them, or write powers_of_two")
    return list(KNOBS[name].choices)


def _solved(name: str, _: SpaceContext, __: Mapping[str, Domain]) -> list[Value]:
    """Only the even layout; proposed layouts are added once the whole space is known (`resolve_space`)."""
    if name != "pipeline_layout":
        raise KnobValueError(name, "is not solved for", "list its values, or write powers_of_two")
    return [""]


EXPRESSIONS: dict[str, Callable[[str, SpaceContext, Mapping[str, Domain]], list[Value]]] = {
    "powers_of_two": _powers_of_two,
    "divisors": _divisors,
    "element_sizes": _element_sizes,
    "all": _all,
    SOLVED: _solved,
}
"""Expressions that may replace a list of values."""


def _largest(name: str, context: SpaceContext, degrees: Mapping[str, Domain]) -> int:
    """The largest value of a degree, a count or a batch that could be legal."""
    counts_to = KNOBS[name].counts_to
    if counts_to is None:
        raise KnobValueError(name, "has no largest value to count up to", "list its values")
    largest_replica = math.prod(max(int(value) for value in domain) for domain in degrees.values())
    return counts_to(context, max(context.world_size // largest_replica, 1))


def _two_digits(number: int) -> int:
    step = int(10 ** max(len(str(number)) - 2, 0))
    return number // step * step
