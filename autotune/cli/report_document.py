"""A report that is one document: a page of it, its JSON, or what the console shows."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.ops.output import write_whole

Document = Mapping[str, Any]


def tell_document(
    document: Document, page: Callable[[Document], str], path: Path | None, as_json: bool, show: Callable[[Document], None]
) -> None:
    """Write the page where a path was given; then the JSON, or what people read, to standard output."""
    if path:
        write_whole(path, page(document))
    if as_json:
        # Written first to a string: a figure that JSON cannot hold must not leave half a document.
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    else:
        show(document)
