"""What the command line gave for a sweep. Loads nothing, so that its options can name it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_OUT = Path("best-config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What the command line gave."""

    fields: dict[str, Any]
    """Fields of the request that were given as options; `ranks` as text."""
    series: dict[str, Any]
    """What was given of a series of jobs: price, rate, step."""
    pins: tuple[str, ...]
    baseline: Path | None
    imported: Path | None
    """A configuration of another framework: the baseline."""
    history: str | None
    """An Optuna study, or a table, of earlier trials."""
    out: Path
    config: Path | None
    resume: str | None
    database: str | None
    json: bool
    pass_environment: tuple[str, ...] = ()
    """Variables that trials find, beside those of a fixed list."""
