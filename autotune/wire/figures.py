"""A figure of a job, and the parts of a trial's step."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Cell = bool | int | float | str | None
"""None: no value. Floats are finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a figure."""

    title: str
    unit: str = ""
    """As for a `Column`."""
    column: str = ""
    """The column of the first table that is drawn along it; empty: the figure does not have two axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One value for every row."""

    name: str
    """The name for programs."""
    title: str
    """The name for readers."""
    values: tuple[Any, ...]
    """One value for each row. None: the row has no value."""
    unit: str = ""
    """samples/s, bytes, seconds, share, times, FLOP or elements. Empty: a name, a count, or a value of a knob."""


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
    """The name for readers."""
    value: float
    """Where the line crosses the axis, in the unit of the axis."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobEffect:
    """The predicted effect of a change."""

    speed: float
    """Samples/s after the change divided by those before it."""
    peak_memory: float
    """Peak memory after the change divided by that before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobDifference:
    """A knob in which two configurations differ."""

    knob: str
    before: Any
    """Its value in the trial."""
    after: Any
    """Its value in the other trial."""
    first: KnobEffect | None
    """If it is the first knob to change. None: the rules refuse this, or the equations do not know the model."""
    last: KnobEffect | None
    """If it is the last knob to change. None as above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """From the configuration of one trial to that of another."""

    trial: int
    """Number of the trial before the changes."""
    other: int
    """Number of the trial after them."""
    measured_speed: float | None
    """Measured samples/s of the other trial divided by those of the trial. None: one of them was not measured."""
    total: KnobEffect | None
    """The predicted effect of all changes together. None: the equations do not know the model."""
    knobs: tuple[KnobDifference, ...]
    """Largest effect first."""
    note: str
    """The source of the predictions, or why there are none."""
