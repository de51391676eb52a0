"""Response models of a job's figures and of the parts of a trial's step."""

from typing import Any

from pydantic import BaseModel


class AxisView(BaseModel):
    """An axis of a figure."""

    title: str
    unit: str
    column: str
    """The column of the first table that is drawn along it; empty: the figure does not have two axes."""


class ColumnView(BaseModel):
    """One value for every row."""

    name: str
    title: str
    values: list[Any]
    unit: str
    """samples/s, bytes, seconds, share, times, FLOP, elements; empty: a name or a count."""


class TableView(BaseModel):
    """The rows of a table, stored by column."""

    name: str
    title: str
    """In words, what a row is."""
    columns: list[ColumnView]


class MarkView(BaseModel):
    """A line across a figure, such as a limit or the baseline."""

    axis: str
    name: str
    title: str
    value: float


class FigureView(BaseModel):
    """One figure of a job as plain data."""

    name: str
    title: str
    summary: str
    """One sentence with the main result; for a figure without data, the reason."""
    x: AxisView | None
    y: AxisView | None
    tables: list[TableView]
    """The first one is drawn. Empty: there is nothing to show."""
    marks: list[MarkView]
    notes: list[str]


class PartView(BaseModel):
    """An activity that takes a part of the step."""

    name: str
    seconds: float
    share: float


class PartsView(BaseModel):
    """A trial's measured step, divided into parts by the equations."""

    trial: int
    step_seconds: float | None
    """null: nothing was measured."""
    parts: list[PartView]
    """compute, tensor, pipeline, data, optimizer, offload and the unexplained rest; empty: `note` says why."""
    note: str
    """The source of the division, or why there is none."""
