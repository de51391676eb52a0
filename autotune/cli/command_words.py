"""The user's command on the command line: everything after `--`, and the options about it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from autotune.errors import RequestError

SCRIPT_COMMANDS = ("sweep", "submit", "check")
"""Our commands whose question may be a user's command."""
COMMANDS = (*SCRIPT_COMMANDS, "verify")
"""Our commands that accept a user's command."""
KEY = "command"


def without_command(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split our arguments from the words of the user's command, in which our options are not parsed."""
    words = list(arguments)
    if not words or words[0] not in COMMANDS or "--" not in words:
        return words, {}
    at = words.index("--")
    return words[:at], {KEY: words[at + 1 :]}


def command_of(context: typer.Context, **options: Any) -> dict[str, Any] | None:
    """The field `command` of a request; None: there is none.

    Raises:
        RequestError: an option about a command is given without a command, or cannot be parsed.
    """
    settings = {name: value for name, value in options.items() if value is not None}
    words = (context.obj or {}).get(KEY)
    if words is None:
        if settings:
            name = next(iter(settings))
            raise RequestError(name, "requires a command", "write the command after --, as in -- python train.py")
        return None
    if (template := settings.pop("template", None)) is not None:
        try:
            settings |= {"template": template.read_text(encoding="utf-8"), "template_name": template.name.removesuffix(".in")}
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError("command.template", f"{template} cannot be read ({error})", "name a text file") from error
    for name in ("script_knobs", "environment_knobs"):
        if name in settings:
            settings[name] = dict(_values(name, text) for text in settings[name])
    return {"arguments": words, "folder": str(Path.cwd()), **settings}


def _values(field: str, text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise RequestError(f"command.{field}", f"{text!r} is not NAME=VALUES", "write for example num_workers=0,2,4")
    return name.strip(), [value.strip() for value in values.split(",")]
