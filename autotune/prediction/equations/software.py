"""Profiles of training software: our own engine, and software named in tables of measurements."""

import dataclasses
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from autotune.prediction.equations.cases import Software, scalar

_STATED = re.compile(r"\b([a-z_]+)=(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.,])")
_FILE = Path(__file__).with_name("software.toml")


def software_named(text: str, *, gated: bool, first_rank: bool = False) -> tuple[Software, dict[str, float]]:
    """Return the profile of the software that `text` (framework, kernel, precision, notes) names, and its layout defaults."""
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
    """Return the defaults, overridden by every stack whose words all occur in `text`, then by the features that it states.

    A feature is stated as `name=number`, with a name of `software.toml`; names of software only give the others.
    """
    tables = _tables()
    values: dict[str, float] = dict(tables["default"])
    for stack in tables["stack"]:
        if all(word in text for word in stack["words"]):
            values |= {name: value for name, value in stack.items() if name != "words"}
    return values | {name: float(number) for name, number in stated_features(text)}


def stated_features(text: str) -> list[tuple[str, str]]:
    """The features that `text` states, with their numbers."""
    known = _tables()["default"]
    return [(name, number) for name, number in _STATED.findall(text.lower()) if name in known]


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
