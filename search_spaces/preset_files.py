"""The presets of the package: TOML tables by name, and the error for an unknown name."""

import difflib
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from search_spaces.errors import UnknownNameError


@cache
def preset_tables(file: str) -> dict[str, dict[str, Any]]:
    """The tables of a preset file by name, in the order of the file. Do not modify: the result is cached."""
    return tomllib.loads((Path(__file__).parent / "presets" / f"{file}.toml").read_text(encoding="utf-8"))


def plain_name(name: str) -> str:
    """The letters and digits of a name, by which other spellings of it are recognised."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def unknown_name(
    kind: str, name: str, known_names: Iterable[str], otherwise: str = "", listed_by: str = ""
) -> UnknownNameError:
    """The error for an unknown name, with the closest known names, or all of them or the command that lists them; `otherwise`
    describes other accepted input."""
    names = list(known_names)
    matches = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    use = f"`{listed_by}` lists them" if listed_by else f"use one of {', '.join(names)}"
    remedy = f"did you mean {' or '.join(matches)}?" if matches else use
    return UnknownNameError(name, f"no {kind} has this name", remedy + (f" ({otherwise})" if otherwise else ""))
