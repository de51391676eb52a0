"""A figure of a job, and the parts of a trial's step."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a figure."""

    title: str
    unit: str
    """As for a `Column`."""
    column: str
    """The column of the first table that is drawn along it. Empty: the figure does not have two axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One value for every row."""

    name: str
    """The name for programs."""
    title: str
    """The name for readers."""
    values: tuple[Any, ...]
    """One value for each row. None: the row has no value."""
    unit: str
    """samples/s, bytes, seconds, share, times, FLOP or elements. Empty: a name, a count, or a value of a knob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The rows of a table, stored by column."""

    name: str
    """The name for programs."""
    title: str
    """What a row is, in words."""
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A line across a figure, such as a limit or the baseline."""

    axis: str
    """`x` or `y`: the axis that `value` is on."""
    name: str
    """The name for programs."""
    title: str
    """The name for readers."""
    value: float
    """Where the line crosses the axis, in the unit of the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a job as plain data."""

    name: str
    """The name for programs."""
    title: str
    """The name for readers."""
    summary: str
    """One sentence with the main result. If the figure has no data: the reason."""
    x: Axis | None
    """None: the figure has no axes."""
    y: Axis | None
    """None: the figure has no axes."""
    tables: tuple[Table, ...]
    """The first table is drawn. Empty: the figure has no data."""
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]
    """How the figure was computed and what is missing, a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """An activity that takes a part of the step."""

    name: str
    """compute, tensor, pipeline, data, optimizer, offload, or unexplained for the rest."""
    seconds: float
    share: float
    """Share of the step's duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """A trial's measured step, divided into parts by the equations."""

    trial: int
    """Number of the trial."""
    step_seconds: float | None
    """Seconds per optimizer step. None: nothing was measured."""
    parts: tuple[StepPart, ...]
    """Empty: `note` says why."""
    note: str
    """The source of the division, or why there is none."""
