"""Render a canvas with a title and two axes as lines of text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from autotune.cli.canvas import Canvas

MARGIN = 0.05
"""Margin on either side as a share of the values' range, so that marks do not lie on an axis."""
FLAT = 0.1
"""The same as a share of the value, if all values are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values."""

    low: float
    high: float
    text: Callable[[float], str]
    """Formats a value with its unit, in a few characters."""

    def share(self, value: float) -> float:
        """Position between the ends: 0 to 1 within the range."""
        return (value - self.low) / (self.high - self.low)


def axis_of(values: Sequence[float], text: Callable[[float], str]) -> Axis:
    """An axis for these values, which must not be negative."""
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or FLAT * abs(high) or 1.0
    return Axis(low=max(low - margin, 0.0), high=high + margin, text=text)


def canvas_size(width: int, height: int, y: Axis) -> tuple[int, int]:
    """Columns and rows of the canvas in a chart of this width and height; may be too few to draw."""
    return width - _label_width(y) - 1, height - 3


def chart(title: str, canvas: Canvas, x: Axis, y: Axis) -> list[Text]:
    """The lines: title, canvas with the limits of the vertical axis, horizontal axis, and its limits."""
    left = _label_width(y)
    width = left + 1 + canvas.columns
    lines = [Text(title, style="bold")]
    for row, drawn in enumerate(canvas.lines()):
        label = y.text(y.high) if row == 0 else y.text(y.low) if row == canvas.rows - 1 else ""
        lines.append(Text.assemble((f"{label:>{left}}{'┤' if label else '│'}", "dim"), drawn))
    lines.append(Text(f"{'':{left}}└{'─' * canvas.columns}", style="dim"))
    low, high = x.text(x.low), x.text(x.high)
    lines.append(Text(f"{'':{left}} {low}{high:>{max(canvas.columns - cell_len(low), 0)}}", style="dim"))
    for line in lines:
        line.truncate(width, pad=True)
    return lines


def side_by_side(left: Sequence[Text], right: Sequence[Text], gap: int) -> list[Text]:
    """Join charts of the same height horizontally."""
    return [Text.assemble(one, " " * gap, other) for one, other in zip(left, right, strict=True)]


def _label_width(y: Axis) -> int:
    return max(cell_len(y.text(y.low)), cell_len(y.text(y.high)))
