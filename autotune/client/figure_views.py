"""A figure of a job, and where a trial's step goes."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A direction of a drawing."""

    title: str
    unit: str
    column: str
    """The column of the first table that is drawn along it; empty: the figure has no two axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure of every row."""

    name: str
    title: str
    values: tuple[Any, ...]
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of a figure, by column."""

    name: str
    title: str
    """In words, what a row is."""
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across a figure: a limit, the baseline."""

    axis: str
    name: str
    title: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a job as plain data."""

    name: str
    title: str
    summary: str
    """One sentence that says what is seen; of a figure that there is nothing for, why."""
    x: Axis | None
    y: Axis | None
    tables: tuple[Table, ...]
    """The first one is what is drawn. Empty: there is nothing to show."""
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """What a step is spent on."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A trial's measured step, divided by the equations."""

    trial: int
    step_seconds: float | None
    """None: nothing was measured."""
    parts: tuple[StepPart, ...]
    """Empty: `note` says why."""
    note: str
    """What the division rests on, or why there is none."""
