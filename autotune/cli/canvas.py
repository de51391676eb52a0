"""A character canvas: marks that fill a cell, and step lines of Braille dots, 2 x 4 per cell."""

from collections.abc import Sequence

from rich.text import Text

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character's dots, by column and by row from the top [The Unicode Standard, Braille Patterns]."""
_BRAILLE = 0x2800
Point = tuple[float, float]
"""Position as a share of the width from the left and of the height from the bottom, 0 to 1; values outside are clipped."""


class Canvas:
    """A grid of columns and rows of cells. Later drawing covers earlier drawing."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._cells: dict[tuple[int, int], tuple[str, str]] = {}
        self._dots: dict[tuple[int, int], int] = {}

    def mark(self, at: Point, character: str, style: str = "") -> None:
        """Draw one character."""
        self._cells[_place(at[0], self.columns), _place(1 - at[1], self.rows)] = (character, style)

    def across(self, height: float, character: str, style: str = "") -> None:
        """Draw a horizontal line."""
        for column in range(self.columns):
            self._cells[column, _place(1 - height, self.rows)] = (character, style)

    def upright(self, place: float, character: str, style: str = "") -> None:
        """Draw a vertical line."""
        for row in range(self.rows):
            self._cells[_place(place, self.columns), row] = (character, style)

    def stairs(self, points: Sequence[Point], style: str = "") -> None:
        """Draw a step line: horizontal from each point to the next, then vertical; the last step extends to the right edge."""
        steps = [(_place(x, 2 * self.columns), _place(1 - y, 4 * self.rows)) for x, y in points]
        for (column, row), (end, level) in zip(steps, [*steps[1:], (2 * self.columns - 1, steps[-1][1])], strict=True):
            for along in range(column, end + 1):
                self._dot(along, row, style)
            for between in range(min(row, level), max(row, level) + 1):
                self._dot(end, between, style)

    def lines(self) -> list[Text]:
        """The rows, from the top."""
        return [
            Text.assemble(*(self._cells.get((column, row), (" ", "")) for column in range(self.columns)))
            for row in range(self.rows)
        ]

    def _dot(self, column: int, row: int, style: str) -> None:
        cell = column // 2, row // 4
        self._dots[cell] = self._dots.get(cell, 0) | _DOTS[column % 2][row % 4]
        self._cells[cell] = (chr(_BRAILLE + self._dots[cell]), style)


def _place(share: float, count: int) -> int:
    """Index of the cell."""
    return min(max(int(share * count), 0), count - 1)
