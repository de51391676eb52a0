"""Output of a report document: as a page, as JSON, or on the console."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.cli.documents import write_document
from autotune.ops.output import write_whole

Document = Mapping[str, Any]


def print_document(
    document: Document, page: Callable[[Document], str], path: Path | None, as_json: bool, show: Callable[[Document], None]
) -> None:
    """Write the page if a path is given; then print JSON or text to standard output."""
    if path:
        write_whole(path, page(document))
    if as_json:
        write_document(document)
    else:
        show(document)
