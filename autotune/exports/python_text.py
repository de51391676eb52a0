"""Writes values as formatted Python code."""

import json
from collections.abc import Mapping


def python_text(value: object, indent: str = "") -> str:
    """The value as an expression: mappings on several lines, text in double quotes."""
    if isinstance(value, Mapping):
        if not value:
            return "{}"
        inner = indent + "    "
        lines = "".join(f"{inner}{python_text(name)}: {python_text(item, inner)},\n" for name, item in value.items())
        return f"{{\n{lines}{indent}}}"
    if isinstance(value, tuple) and value:
        return f"({', '.join(python_text(item) for item in value)}{',' if len(value) == 1 else ''})"
    return json.dumps(value) if isinstance(value, str) else repr(value)
