"""The terminal: what is printed on it is text, whoever wrote it, never a command to it."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from autotune.text.visible_text import visible


class Console(RichConsole):
    """A console that shows control characters instead of sending them, and reads no markup unless it is asked to."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich sends by itself, such as the moves of a live display, is in control segments, which stay as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
