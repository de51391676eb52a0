"""The data types of figures: tables of columns, axes, marks. They hold the content; the drawing code decides the look."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from search_spaces.knob_values import value_text
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import TrialRecord

Cell = bool | int | float | str | None
"""None: no value. Floats are finite."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a figure."""

    title: str
    unit: Unit = Unit.NONE
    column: str = ""
    """The column of the first table that is drawn along it; empty: the figure does not have two axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One value for every row."""

    name: str
    """The name for programs."""
    title: str
    """The name for readers."""
    values: tuple[Cell, ...]
    unit: Unit = Unit.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of a table, stored by column."""

    name: str
    title: str
    """In words, what a row is."""
    columns: tuple[Column, ...]

    def __len__(self) -> int:
        return len(self.columns[0].values) if self.columns else 0

    def column(self, name: str) -> tuple[Cell, ...]:
        """The values of the column of that name.

        Raises:
            KeyError: there is no such column.
        """
        for column in self.columns:
            if column.name == name:
                return column.values
        raise KeyError(name)

    def rows(self) -> Iterable[tuple[Cell, ...]]:
        """The rows, with cells in the order of the columns."""
        return zip(*(column.values for column in self.columns), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across a figure, such as a limit or the baseline."""

    axis: str
    """`x` or `y`: the axis that `value` is on; the line is perpendicular to it."""
    name: str
    """The name for programs."""
    title: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a job."""

    name: str
    title: str
    summary: str
    """One sentence with the main result; for a figure without data, the reason."""
    x: Axis | None = None
    y: Axis | None = None
    tables: tuple[Table, ...] = ()
    """The first one is drawn. Empty: there is nothing to show, and `summary` says why."""
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()
    """How it was computed and what is missing, a sentence each."""

    def __bool__(self) -> bool:
        return bool(self.tables)

    def table(self, name: str) -> Table:
        """The table of that name.

        Raises:
            KeyError: there is no such table.
        """
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)


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
