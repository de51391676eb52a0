"""The software of a row of a table of measurements: its framework, and the features that the row states."""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from autotune.prediction.equations.software import Software, software_of, with_numbers

_FILE = Path(__file__).with_suffix(".toml")
FEATURES = frozenset(field.name for field in dataclasses.fields(Software) if field.name != "first_rank")
"""What a row can state of its software."""


def row_software(text: str) -> Software:
    """The software that a row describes: the defaults, or our own engine, overridden by every stack whose words all match
    `text`, then by the features that it states.

    `text` has parts between semicolons: `framework=NAME`, `precision=TYPE`, `kernel=NAME`, and so on; parts without a name are
    notes. A word of a stack matches whole words of the parts with its name. A feature is stated as `name=number`, with a name
    of `FEATURES`; names of software only give the others.
    """
    text, parts, values = text.lower(), dict[str, str](), dict[str, float]()
    for part in text.split(";"):
        name, equals, value = part.strip().partition("=")
        key = name if equals else "notes"
        parts[key] = f"{parts.get(key, '')}; {value if equals else name}"
    for stack in _stacks():
        if all(_matches(word, parts) for word in stack["words"]):
            values |= {name: value for name, value in stack.items() if name != "words"}
    values |= {name: float(number) for name, number in stated_features(text)}
    engine = parts.get("engine", "").strip("; ")
    return with_numbers(software_of(engine, "") if engine else Software(), values)


def numbers_of(software: Software) -> dict[str, float]:
    """What a row can state, of one case."""
    return {name: float(getattr(software, name)[0]) for name in sorted(FEATURES)}


def _matches(word: str, parts: Mapping[str, str]) -> bool:
    name, _, pattern = word.partition("=")
    return re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", parts.get(name, "")) is not None


def stated_features(text: str) -> list[tuple[str, str]]:
    """The features that `text` states, with their numbers."""
    stated = re.findall(r"\b([a-z_]+)=(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.,])", text.lower())
    return [(name, number) for name, number in stated if name in FEATURES]


@cache
def _stacks() -> list[dict[str, Any]]:
    stacks: list[dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))["stack"]
    return stacks
