"""A canvas with a title and two axes, as lines of text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from autotune.cli.canvas import Canvas

MARGIN = 0.05
"""Of the values' range, beyond them on either side, so that no mark stands on an axis."""
FLAT = 0.1
"""The same, as a share of the value, where all are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values."""

    low: float
    high: float
    text: Callable[[float], str]
    """A value with its unit, in a few characters."""

    def share(self, value: float) -> float:
        """Where it stands between the ends: 0 to 1 within them."""
        return (value - self.low) / (self.high - self.low)


def axis_of(values: Sequence[float], text: Callable[[float], str]) -> Axis:
    """The axis that holds these values, none of them negative."""
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or FLAT * abs(high) or 1.0
    return Axis(low=max(low - margin, 0.0), high=high + margin, text=text)


def room_of(width: int, height: int, y: Axis) -> tuple[int, int]:
    """Columns and rows of the canvas in a chart that is so wide and high; may be too few for anything."""
    return width - _label_width(y) - 1, height - 3


def chart(title: str, canvas: Canvas, x: Axis, y: Axis) -> list[Text]:
    """The lines: the title, the canvas with the ends of the upright axis beside it, the other axis, and its ends."""
    left = _label_width(y)
    width = left + 1 + canvas.columns
    lines = [Text(title, style="bold")]
    for row, drawn in enumerate(canvas.lines()):
        told = y.text(y.high) if row == 0 else y.text(y.low) if row == canvas.rows - 1 else ""
        lines.append(Text.assemble((f"{told:>{left}}{'┤' if told else '│'}", "dim"), drawn))
    lines.append(Text(f"{'':{left}}└{'─' * canvas.columns}", style="dim"))
    low, high = x.text(x.low), x.text(x.high)
    lines.append(Text(f"{'':{left}} {low}{high:>{max(canvas.columns - cell_len(low), 0)}}", style="dim"))
    for line in lines:
        line.truncate(width, pad=True)
    return lines


def side_by_side(left: Sequence[Text], right: Sequence[Text], gap: int) -> list[Text]:
    """Charts of the same height."""
    return [Text.assemble(one, " " * gap, other) for one, other in zip(left, right, strict=True)]


def _label_width(y: Axis) -> int:
    return max(cell_len(y.text(y.low)), cell_len(y.text(y.high)))
