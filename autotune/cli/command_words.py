"""The user's own command on the command line: everything after `--`, and the options that say more of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from autotune.errors import RequestError

TAKES = ("sweep", "submit", "verify")
"""Commands of ours that take one of the user's."""
KEY = "command"


def without_command(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Our own arguments, and the words of the user's command where there is one: no option of ours is looked for in them."""
    ours = list(arguments)
    if not ours or ours[0] not in TAKES or "--" not in ours:
        return ours, {}
    at = ours.index("--")
    return ours[:at], {KEY: ours[at + 1 :]}


def command_of(context: typer.Context, **options: Any) -> dict[str, Any] | None:
    """The field `command` of a request; None: there is none.

    Raises:
        RequestError: an option of a command is given without one, or cannot be read.
    """
    given = {name: value for name, value in options.items() if value is not None}
    words = (context.obj or {}).get(KEY)
    if words is None:
        if given:
            name = next(iter(given))
            raise RequestError(name, "belongs to a command", "write the command after --, as in -- python train.py")
        return None
    for name in ("script_knobs", "environment_knobs"):
        if name in given:
            given[name] = dict(_values(name, text) for text in given[name])
    return {"arguments": words, "folder": str(Path.cwd()), **given}


def _values(field: str, text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise RequestError(f"command.{field}", f"{text!r} is no NAME=VALUES", "write for example num_workers=0,2,4")
    return name.strip(), [value.strip() for value in values.split(",")]
