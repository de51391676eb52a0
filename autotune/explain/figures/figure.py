"""The vocabulary of figures: tables of columns, axes, lines across. Whoever draws one decides how; what it says stands here."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Cell = bool | int | float | str | None
"""None: there is no such figure. Floats are finite."""


class Unit(StrEnum):
    """What a number counts. The values are exported: never rename one."""

    NONE = ""
    """A name, a number of something, or a value of a knob."""
    RATE = "samples/s"
    BYTES = "bytes"
    SECONDS = "seconds"
    SHARE = "share"
    """1 is all of it."""
    RATIO = "times"
    FLOPS = "FLOP"
    ELEMENTS = "elements"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A direction of a drawing."""

    title: str
    unit: Unit = Unit.NONE
    column: str = ""
    """The column of the first table that is drawn along it; empty: the figure has no two axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure of every row."""

    name: str
    """What programs call it."""
    title: str
    """What people read."""
    values: tuple[Cell, ...]
    unit: Unit = Unit.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of a figure, by column."""

    name: str
    title: str
    """In words, what a row is."""
    columns: tuple[Column, ...]

    def __len__(self) -> int:
        return len(self.columns[0].values) if self.columns else 0

    def column(self, name: str) -> tuple[Cell, ...]:
        """The values of the column of that name.

        Raises:
            KeyError: there is none.
        """
        for column in self.columns:
            if column.name == name:
                return column.values
        raise KeyError(name)

    def rows(self) -> Iterable[tuple[Cell, ...]]:
        """The rows, cells in the order of the columns."""
        return zip(*(column.values for column in self.columns), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across a figure: a limit, the baseline."""

    axis: str
    """`x` or `y`: the axis that `value` is on, which the line crosses at a right angle."""
    name: str
    """What programs call it."""
    title: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a job."""

    name: str
    title: str
    summary: str
    """One sentence that says what is seen; of a figure that there is nothing for, why."""
    x: Axis | None = None
    y: Axis | None = None
    tables: tuple[Table, ...] = ()
    """The first one is what is drawn. Empty: there is nothing to show, and `summary` says why."""
    marks: tuple[Mark, ...] = ()
    notes: tuple[str, ...] = ()
    """How it was made and what it lacks, a sentence each."""

    def __bool__(self) -> bool:
        return bool(self.tables)

    def table(self, name: str) -> Table:
        """The table of that name.

        Raises:
            KeyError: there is none.
        """
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)


def column(name: str, title: str, values: Iterable[Any], unit: Unit = Unit.NONE) -> Column:
    """A column; what is not finite is left out."""
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
