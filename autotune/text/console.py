"""The terminal console: printed text never acts as a terminal command, even if it is untrusted."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from autotune.text.visible_text import visible


class Console(RichConsole):
    """A console that shows control characters instead of sending them, and marks up and highlights only on request."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Keep control segments, in which rich sends its own commands such as cursor moves of a live display."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def print_table(self, table: Table, *optional: str) -> None:
        """Print a table without the `optional` columns, in this order, that it has no room for. No word is broken."""
        wide = self.options.update(width=1000)
        for name in optional:
            measured = [(column.no_wrap, table._measure_column(self, wide, column)) for column in table.columns]
            if sum(width.maximum if no_wrap else width.minimum for no_wrap, width in measured) <= self.width:
                break
            columns = (column for column in table.columns if column.header != name)
            # Rich finds the cells of a column by its index.
            table.columns = [dataclasses.replace(column, _index=index) for index, column in enumerate(columns)]
        self.print(table)
