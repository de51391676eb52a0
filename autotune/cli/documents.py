"""What `--json` prints: one document on standard output, whose schema is published in `autotune/schemas/commands`.

A command that fails prints an error document instead (`error.schema.json`), beside the line on standard error.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from search_spaces.plain import finite

SCHEMAS = Path(__file__).parents[1] / "schemas" / "commands"


def schema_path(command: str) -> Path:
    """The schema of a command's document, or of `error`."""
    return SCHEMAS / f"{command.replace(' ', '-')}.schema.json"


def write_document(document: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Print the document, with null for numbers that JSON cannot represent. It is made whole before anything is printed."""
    sys.stdout.write(json.dumps(finite(document), indent=2, allow_nan=False, default=default) + "\n")


def error_document(message: str, exit_status: int, error: BaseException | str) -> dict[str, Any]:
    """The document of a command that failed. `error`: one of ours; or the kind, where nothing was raised."""
    parts = {name: getattr(error, name, None) for name in ("field", "problem", "remedy")}
    kind = error if isinstance(error, str) else type(error).__name__
    return {"error": {"kind": kind, "message": message, **parts, "exit_status": exit_status}}
