"""Parsed options of a sweep. Imports almost nothing, because the command line needs it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_OUT = Path("best-config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Parsed options of `autotune sweep`."""

    fields: dict[str, Any]
    """Fields of the request that were given as options; `ranks` as text."""
    series: dict[str, Any]
    """Options of a series of jobs: price, rate, step."""
    pins: tuple[str, ...]
    baseline: Path | None
    imported: Path | None
    """A configuration of another framework that becomes the baseline."""
    history: str | None
    """An Optuna study or a table of earlier trials."""
    out: Path
    config: Path | None
    resume: str | None
    database: str | None
    json: bool
    pass_environment: tuple[str, ...] = ()
    """Environment variables passed to trials in addition to a fixed list."""
