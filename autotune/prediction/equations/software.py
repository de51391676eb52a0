"""Profiles of training software: our own engine, and software named in tables of measurements."""

import dataclasses
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from autotune.prediction.equations.cases import Software, scalar

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
    """Return the defaults, overridden by every stack whose words all occur in `text`."""
    tables = _tables()
    values: dict[str, float] = dict(tables["default"])
    for stack in tables["stack"]:
        if all(word in text for word in stack["words"]):
            values |= {name: value for name, value in stack.items() if name != "words"}
    return values


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))
