"""Profiles of training software: our own engine, and software named in tables of measurements."""

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from autotune.prediction.equations.cases import Software, scalar

_FILE = Path(__file__).with_name("software.toml")


def software_named(text: str, *, gated: bool, first_rank: bool = False) -> tuple[Software, dict[str, float]]:
    """Return the profile of the software that `text` describes (see `profile`), and its layout defaults."""
    values = profile(text.lower())
    of_model = {
        "norm_extra": values["rms_extra"] if gated else 0.0,
        "mlp_bytes": values["gated_bytes"] if gated else values["plain_bytes"],
        "first_rank": float(first_rank),
    }
    fields = {field.name for field in dataclasses.fields(Software)}
    software = Software(**{name: scalar(value) for name, value in {**values, **of_model}.items() if name in fields})
    return software, values


def profile(text: str) -> dict[str, float]:
    """Return the defaults, overridden by every stack whose words all match `text`, then by the features that it states.

    `text` has parts between semicolons: `framework=NAME`, `precision=TYPE`, `kernel=NAME`, and so on; parts without a name are
    notes. A word of a stack matches whole words of the parts with its name. A feature is stated as `name=number`, with a name
    of `software.toml`; names of software only give the others.
    """
    tables = _tables()
    values: dict[str, float] = dict(tables["default"])
    parts: dict[str, str] = {}
    for part in text.split(";"):
        name, equals, value = part.strip().partition("=")
        key = name if equals else "notes"
        parts[key] = f"{parts.get(key, '')}; {value if equals else name}"
    for stack in tables["stack"]:
        if all(_matches(word, parts) for word in stack["words"]):
            values |= {name: value for name, value in stack.items() if name != "words"}
    return values | {name: float(number) for name, number in stated_features(text)}


def _matches(word: str, parts: Mapping[str, str]) -> bool:
    name, _, pattern = word.partition("=")
    return re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", parts.get(name, "")) is not None


def stated_features(text: str) -> list[tuple[str, str]]:
    """The features that `text` states, with their numbers."""
    features = _tables()["default"]
    stated = re.findall(r"\b([a-z_]+)=(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.,])", text.lower())
    return [(name, number) for name, number in stated if name in features]


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
