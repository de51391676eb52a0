"""Helpers that make figures (`autotune.wire.figures`): they hold the content; the drawing code decides the look."""

import math
from collections.abc import Collection, Iterable, Sequence
from enum import StrEnum
from typing import Any

from autotune.wire.figures import Cell, Column, Table
from search_spaces.knob_values import value_text
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import TrialRecord


class Unit(StrEnum):
    """What a number counts. The values are exported: never rename one."""

    NONE = ""
    """A name, a count, or a value of a knob."""
    RATE = "samples/s"
    BYTES = "bytes"
    SECONDS = "seconds"
    SHARE = "share"
    """1 is the whole."""
    RATIO = "times"
    FLOPS = "FLOP"
    ELEMENTS = "elements"


def column(name: str, title: str, values: Iterable[Any], unit: Unit = Unit.NONE) -> Column:
    """A column; values that are not finite become None."""
    return Column(name=name, title=title, values=tuple(map(_cell, values)), unit=unit)


def table(name: str, title: str, columns: Sequence[Column]) -> Table:
    """A table of these columns."""
    return Table(name=name, title=title, columns=tuple(columns))


def _cell(value: Any) -> Cell:
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


ALWAYS = ("zero_stage", "micro_batch_size")
"""Knobs that are always shown."""


def varying(trials: Iterable[TrialRecord]) -> list[str]:
    """The knobs in which trials differ, in display order."""
    configs = [trial.config for trial in trials]
    return [name for name in KNOB_NAMES if len({getattr(config, name) for config in configs}) > 1]


def config_text(config: TrialConfig, knobs: Collection[str] = ()) -> str:
    """`zero_stage=1 micro_batch_size=2`: the values of these knobs that are not defaults, and always those of `ALWAYS`."""
    shown = [name for name in KNOB_NAMES if name in ALWAYS or (name in knobs and getattr(config, name) != _DEFAULTS[name])]
    return " ".join(f"{name}={value_text(getattr(config, name))}" for name in shown)


def counted(count: int, what: str) -> str:
    """`1 trial`, `3 trials`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


_DEFAULTS = {name: getattr(TrialConfig(), name) for name in KNOB_NAMES}
