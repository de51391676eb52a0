"""Writes nested tables as YAML without a YAML package."""

import json
import re
from collections.abc import Mapping

_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")
_SPECIAL = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML does not read as text."""


def yaml_text(content: Mapping[str, object]) -> str:
    """The tables as YAML, keys in their order."""
    return "".join(_lines(content, ""))


def _lines(content: Mapping[str, object], indent: str) -> list[str]:
    lines = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{key}:\n", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return lines


def _scalar(value: object) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _SPECIAL:
        return value
    return json.dumps(value)
