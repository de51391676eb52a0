"""Calls of the command line, as tests see them, and its commands."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import typer

from autotune.cli.app import app


@dataclass(frozen=True)
class Answer:
    """What a call of the command left."""

    status: int
    out: str
    err: str


Command = Callable[..., Answer]


def registered(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Name and command of each that there is, those of groups by both words."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from registered(inner, (*words, name))
    else:
        yield " ".join(words), command


COMMANDS = dict(registered(typer.main.get_command(app)))
