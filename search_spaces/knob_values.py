"""All knobs by name; parsing and validation of their values."""

import re
from collections.abc import Mapping

from search_spaces.errors import KnobValueError
from search_spaces.knob import Knob, Value, ValueKind, knobs_of
from search_spaces.preset_files import unknown_name
from search_spaces.quantities import Quantity, read_quantity
from search_spaces.trial_config import TrialConfig

KNOBS: Mapping[str, Knob] = knobs_of(TrialConfig)
"""All knobs by name, ordered by number."""


def knob(name: str) -> Knob:
    """The knob with this name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in KNOBS:
        raise unknown_name("knob", name, KNOBS)
    return KNOBS[name]


def parse_value(name: str, text: str) -> Value:
    """Parse a value that a user wrote for a knob: 5e8, 1_000_000, true, off, bf16, and 4k tokens.

    Raises:
        UnknownNameError: there is no such knob.
        KnobValueError: the text is not a value of its domain.
    """
    spelled = text.strip()
    kind = knob(name).kind
    true = ("true", "on", "yes")
    false = ("false", "off", "no")
    if kind is ValueKind.BOOL and spelled.lower() in true + false:
        return spelled.lower() in true
    if kind in (ValueKind.INT, ValueKind.FLOAT) and re.fullmatch(r"[+-]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][+-]?\d+)?", spelled):
        return check_value(name, int(spelled) if re.fullmatch(r"[+-]?\d+(_\d+)*", spelled) else float(spelled))
    if knob(name).unit == "tokens" and (tokens := read_quantity(Quantity.LENGTH, spelled)) is not None:
        return check_value(name, tokens)
    return check_value(name, spelled.lower() if kind is ValueKind.CHOICE and knob(name).choices else spelled)


def check_value(name: str, value: object) -> Value:
    """`value` converted to the knob's type (5e8 becomes 500000000 for whole numbers).

    Raises:
        UnknownNameError: there is no such knob.
        KnobValueError: the value is not in its domain.
    """
    the_knob = knob(name)
    checked = _typed(the_knob, value)
    if the_knob.choices and checked not in the_knob.choices:
        raise _refused(the_knob, value)
    if isinstance(checked, int | float) and not the_knob.choices and not the_knob.holds(checked):
        raise _refused(the_knob, value)
    return checked if the_knob.normalise is None else the_knob.normalise(str(checked))


def domain_text(the_knob: Knob) -> str:
    """The domain in words: `0, 1, 2 or 3`; `a whole number of elements, at least 1`."""
    if the_knob.kind is ValueKind.BOOL:
        return "true or false"
    if the_knob.choices:
        *choices, last = (str(choice) for choice in the_knob.choices)
        return f"{', '.join(choices)} or {last}"
    if the_knob.kind is ValueKind.CHOICE:
        return the_knob.unit
    quantity = f"a whole number of {the_knob.unit}" if the_knob.kind is ValueKind.INT else f"a {the_knob.unit or 'number'}"
    if the_knob.maximum is not None:
        return f"{quantity} from {the_knob.minimum:g} to {the_knob.maximum:g}"
    return f"{quantity}, at least {the_knob.minimum:g}"


def value_text(value: object) -> str:
    """A knob's value as text that --pin accepts."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(the_knob: Knob, value: object) -> Value:
    kind = the_knob.kind
    if isinstance(value, bool):
        if kind is ValueKind.BOOL:
            return value
    elif isinstance(value, str):
        if kind is ValueKind.CHOICE:
            return value
    elif isinstance(value, int | float):
        if kind is ValueKind.FLOAT:
            return float(value)
        if kind is ValueKind.INT and (isinstance(value, int) or value.is_integer()):
            return int(value)
    raise _refused(the_knob, value)


def _refused(the_knob: Knob, value: object) -> KnobValueError:
    return KnobValueError(the_knob.name, f"{value!r} is not in its domain", f"give {domain_text(the_knob)}")
