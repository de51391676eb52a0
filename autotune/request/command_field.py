"""Parse the field `command` of a request in its different forms."""

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from autotune.errors import RequestError
from search_spaces.models.command import CommandModel
from search_spaces.quantities import Quantity, read_quantity

MOST_PARAMETERS = 1e16
"""Upper limit; more than any model has."""
FIELDS = tuple(item.name for item in dataclasses.fields(CommandModel))


def with_command(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the command as a table, and with the model and engine that follow from it.

    A command is a list of words, one line in shell syntax, or a table with `arguments` and further fields.

    Raises:
        RequestError: it is none of these, or the request names another model or engine.
        ModelFormatError: one of its fields is invalid.
    """
    given = fields.get("command")
    if given is None:
        return dict(fields)
    table = _table(given)
    model = CommandModel(**table)
    if fields.get("engine", "command") != "command":
        raise RequestError("engine", f"{fields['engine']} does not run a command", "use command, or leave the command out")
    if fields.get("model", model.name) != model.name:
        raise RequestError("model", "is determined by the command", "leave it out, or the command")
    return {**fields, "command": table, "model": model.name, "engine": "command"}


def parse_allowed(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse `FOLDER:COMMAND` to the folder and the words that a command must begin with.

    Raises:
        RequestError: it does not have this form.
    """
    folder, colon, command = text.partition(":")
    try:
        words = tuple(shlex.split(command))
    except ValueError:
        words = ()
    if not (folder.startswith("/") and colon and words):
        raise RequestError("allow-command", f"{text!r} is not FOLDER:COMMAND", "write '/srv/project:python train.py'")
    return folder.rstrip("/") or "/", words


def _table(given: Any) -> dict[str, Any]:
    if isinstance(given, CommandModel):
        return {name: getattr(given, name) for name in FIELDS}
    if isinstance(given, str | list | tuple):
        given = {"arguments": given}
    if not isinstance(given, Mapping):
        raise RequestError("command", f"{given!r} is not a command", "give its words as a list")
    for name in given:
        if name not in FIELDS:
            raise RequestError(f"command.{name}", "is not known", f"use some of {', '.join(FIELDS)}")
    words = given.get("arguments", ())
    if isinstance(words, str):
        try:
            words = shlex.split(words)
        except ValueError as error:
            raise RequestError(
                "command.arguments", f"{words!r} cannot be read ({error})", "give its words as a list"
            ) from error
    if not isinstance(words, list | tuple):
        raise RequestError("command.arguments", f"{words!r} is not a list of words", "give its words as a list")
    if isinstance(count := given.get("parameter_count"), str):
        known = read_quantity(Quantity.COUNT, count)
        if known is None or not 1 <= known < MOST_PARAMETERS:
            raise RequestError("command.parameter_count", f"{count!r} is not a number of parameters", "write 125M or 7B")
        given = {**given, "parameter_count": round(known)}
    for name in ("script_knobs", "environment_knobs"):
        if not isinstance(given.get(name, {}), Mapping):
            raise RequestError(f"command.{name}", f"{given[name]!r} is not a table", "give {NAME: [values]}")
    return {**given, "arguments": tuple(words)}
