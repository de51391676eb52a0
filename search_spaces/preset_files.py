"""The presets of the package: TOML tables by name, and the error for an unknown name."""

import difflib
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


def unknown_name(kind: str, name: str, known_names: Iterable[str], otherwise: str = "") -> UnknownNameError:
    """The error for an unknown name, with the closest known names; `otherwise` describes other accepted input."""
    names = list(known_names)
    matches = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    remedy = f"did you mean {' or '.join(matches)}?" if matches else f"use one of {', '.join(names)}"
    return UnknownNameError(name, f"no {kind} has this name", remedy + (f" ({otherwise})" if otherwise else ""))
