"""The terminal console: printed text never acts as a terminal command, even if it is untrusted."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from autotune.text.visible_text import visible


class Console(RichConsole):
    """A console that shows control characters instead of sending them, and marks up and highlights only on request."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Keep control segments, in which rich sends its own commands such as cursor moves of a live display."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
