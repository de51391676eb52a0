"""A figure of a job, and where a trial's step goes, as they are answered."""

from typing import Any

from pydantic import BaseModel


class AxisView(BaseModel):
    """A direction of a drawing."""

    title: str
    unit: str
    column: str
    """The column of the first table that is drawn along it; empty: the figure has no two axes."""


class ColumnView(BaseModel):
    """One figure of every row."""

    name: str
    title: str
    values: list[Any]
    unit: str
    """samples/s, bytes, seconds, share, times, FLOP, elements; empty: a name or a count."""


class TableView(BaseModel):
    """Rows of a figure, by column."""

    name: str
    title: str
    """In words, what a row is."""
    columns: list[ColumnView]


class MarkView(BaseModel):
    """A line across a figure: a limit, the baseline."""

    axis: str
    name: str
    title: str
    value: float


class FigureView(BaseModel):
    """One figure of a job as plain data."""

    name: str
    title: str
    summary: str
    """One sentence that says what is seen; of a figure that there is nothing for, why."""
    x: AxisView | None
    y: AxisView | None
    tables: list[TableView]
    """The first one is what is drawn. Empty: there is nothing to show."""
    marks: list[MarkView]
    notes: list[str]


class PartView(BaseModel):
    """What a step is spent on."""

    name: str
    seconds: float
    share: float


class PartsView(BaseModel):
    """A trial's measured step, divided by the equations."""

    trial: int
    step_seconds: float | None
    """null: nothing was measured."""
    parts: list[PartView]
    """compute, tensor, pipeline, data, optimizer, offload and what these leave; empty: `note` says why."""
    note: str
    """What the division rests on, or why there is none."""
