"""Checks of single fields and labels of a request. Each raises RequestError with the field, the problem and the remedy."""

import dataclasses
import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from autotune.errors import RequestError
from autotune.question.field import RequestField
from search_spaces.environment import MOST_SETTINGS, STANDARD, environment_text
from search_spaces.errors import KnobValueError
from search_spaces.training.fewer import FEWEST
from search_spaces.trial import Fidelity

ENVIRONMENT_SETTINGS = "environment_settings"


def require(holds: bool, name: str, problem: str, remedy: str) -> None:
    """Raise a RequestError unless the condition holds."""
    if not holds:
        raise RequestError(name, problem, remedy)


def require_text(name: str, value: object) -> None:
    """Refuse anything but text that is not empty."""
    require(isinstance(value, str) and bool(value), name, f"{value!r} is not a name", "give a name or a path")


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices."""
    require(value in choices, name, f"{value!r} is not known", f"use one of {', '.join(choices)}")


def require_declared(name: str, declared: RequestField, kind: Any, value: Any) -> None:
    """Check a given value against the bounds in its field's declaration. `kind`: the field's type."""
    if declared.choices is not None:
        _require_choices(name, kind, value, declared.choices())
    elif kind is bool:
        require(isinstance(value, bool), name, f"{value!r} is not a boolean", "give true or false")
    elif declared.above is not None:
        amount = {"SECONDS": "seconds", "HOURS": "hours", "SHARE": "a share"}.get(declared.unit)
        _require_positive(name, value, amount)
    elif declared.least is not None and kind in (int, int | None):
        _require_whole(name, value, int(declared.least))
    elif declared.least is not None and declared.below is None:
        good = is_number(value) and declared.least <= value < math.inf
        allowed = f"a number of {declared.least:g} or more"
        require(good, name, f"{value!r} is not {allowed}", f"give {allowed}")


def _require_choices(name: str, kind: Any, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices; of a field with several values, one of them or one that is given twice."""
    several = isinstance(value, tuple)
    require(several or kind != tuple[str, ...], name, f"{value!r} is not a list", f"list some of {', '.join(choices)}")
    for item in value if several else (value,):
        require_choice(name, item, choices)
        require(not several or value.count(item) == 1, name, f"{item} is given twice", "leave one of them out")


def _require_whole(name: str, value: object, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(whole, name, f"{value!r} is not a whole number of {least} or more", f"give at least {least}")


def _require_positive(name: str, value: Any, amount: str | None) -> None:
    remedy = "give a positive number" if amount is None else f"give {amount} above 0"
    good = is_number(value) and value > 0 and (amount is not None or value < math.inf)
    require(good, name, f"{value!r} is not a positive number", remedy)


def environment_count(settings: Any) -> int:
    """The number of environment settings, which must be texts and at most `MOST_SETTINGS`."""
    texts = isinstance(settings, tuple) and all(isinstance(text, str) and text.strip() for text in settings)
    require(texts, ENVIRONMENT_SETTINGS, f"{settings!r} is not a list of settings", "list texts such as NCCL_PROTO=Simple")
    count = MOST_SETTINGS if settings == (STANDARD,) else len(settings)
    many = f"{count} settings are more than {MOST_SETTINGS}, and each needs new processes"
    require(count <= MOST_SETTINGS, ENVIRONMENT_SETTINGS, many, f"keep {MOST_SETTINGS} of them")
    return count


def require_settings(settings: tuple[str, ...]) -> None:
    """Refuse environment settings that cannot be read, or that are given twice."""
    if settings == (STANDARD,):
        return
    try:
        spelled = [environment_text(text) for text in settings]
    except KnobValueError as error:
        raise RequestError(ENVIRONMENT_SETTINGS, error.problem, error.remedy) from None
    twice = next((text for text in spelled if spelled.count(text) > 1), None)
    require(twice is None, ENVIRONMENT_SETTINGS, f"{twice} is given twice", "leave one of them out")


def require_fidelity(fidelity: Fidelity) -> None:
    """Refuse a fidelity with a value that is out of range."""
    for item in dataclasses.fields(Fidelity):
        value = getattr(fidelity, item.name)
        if isinstance(item.default, bool):
            good = isinstance(value, bool)
        elif item.name in ("most_micro_batches", "most_layers"):
            good = value is None or (is_number(value) and isinstance(value, int) and value > FEWEST)
        else:
            whole = not isinstance(item.default, int) or isinstance(value, int)
            good = is_number(value) and whole and value > 0
        option = " (--trial-seconds)" if item.name == "max_seconds" else ""
        remedy = f"give a value such as {item.default or 2 * FEWEST}{option}"
        require(good, f"fidelity.{item.name}", f"{value!r} is out of range", remedy)


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/=+-]{0,63}")
MOST_TAGS = 32
LONGEST = {"name": 100, "note": 2000, "team": 100}
"""Maximum characters of each."""


def require_labels(name: object, tags: object, note: object, team: object) -> None:
    """Refuse labels that cannot be displayed in lists.

    Raises:
        RequestError: a text is too long or has control characters, or a tag is not one word.
    """
    for field, text in (("name", name), ("note", note), ("team", team)):
        if not isinstance(text, str):
            raise RequestError(field, f"{text!r} is not text", "give text")
        if len(text) > LONGEST[field]:
            raise RequestError(field, f"has {len(text):,} characters", f"give at most {LONGEST[field]:,}")
        # A note may have several lines. A name must not control the terminal, and databases reject lone surrogates.
        if any(unicodedata.category(char) in ("Cc", "Cs") and (field != "note" or char not in "\n\t") for char in text):
            raise RequestError(field, f"{text!r} has control characters", "leave them out")
    if not isinstance(tags, tuple) or len(tags) > MOST_TAGS:
        raise RequestError("tags", f"{tags!r} is not a list of at most {MOST_TAGS} tags", "list words such as smoke")
    for tag in tags:
        if not isinstance(tag, str) or TAG.fullmatch(tag) is None:
            rule = "letters, digits and . _ : / = + -, at most 64 characters"
            raise RequestError("tags", f"{tag!r} is not a tag", f"give one word of {rule}")
        if tags.count(tag) > 1:
            raise RequestError("tags", f"{tag} is given twice", "leave one of them out")


def checked_labels(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Some labels as they are stored. Raises as `require_labels`."""
    labels = {"name": "", "tags": (), "note": "", "team": "", **changes}
    labels["tags"] = tuple(labels["tags"])
    require_labels(**labels)
    return {name: labels[name] for name in changes}
