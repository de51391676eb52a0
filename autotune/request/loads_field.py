"""The field `expert_loads` of a request: parsed from the command line, and added to the model."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from autotune.errors import RequestError
from autotune.request.number_text import words_of_lines
from search_spaces.models.model import Model, ModelSpec
from search_spaces.training.expert_loads import MOST, Loads, loads_problem

Given = TypeVar("Given", bound=Model)
_FIELD = "expert_loads"
_REMEDY = "give numbers separated by commas, or the path of a file with a line of numbers for all layers or for each"


def read_loads(text: str | None, folder: Path = Path()) -> Loads:
    """Loads of experts, from numbers separated by commas or from a file in `folder` with a line of numbers for all layers with
    experts or for each of them; empty if nothing is given.

    Raises:
        RequestError: the file cannot be read, or it contains something else than numbers.
    """
    if text is None:
        return ()
    rows = words_of_lines(_FIELD, text, r"[\d.,eE+\s-]", folder, _REMEDY)
    return tuple(tuple(_number(word, text) for word in row) for row in rows)


def with_load_rows(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a request; numbers that are not in a list of their own are those of one row."""
    loads = fields.get(_FIELD)
    flat = isinstance(loads, list | tuple) and any(isinstance(load, int | float) for load in loads)
    return {**fields, _FIELD: [loads]} if flat else fields


def require_loads(loads: object) -> None:
    """Refuse anything but rows of numbers.

    Raises:
        RequestError: it is something else, or has too many rows or numbers.
    """
    rows = loads if isinstance(loads, tuple) else (loads,)
    for row in rows:
        if not isinstance(row, tuple) or not all(type(load) in (int, float) for load in row):
            raise RequestError(_FIELD, f"{str(row)[:40]!r} is not a list of numbers", "give a list of lists of numbers")
    if max([len(rows), *map(len, rows)]) > MOST:
        raise RequestError(_FIELD, f"has more than {MOST} rows or numbers in a row", "give a row for each layer with experts")


def with_loads(model: Given, loads: Loads) -> Given:
    """The model whose tokens choose experts by these loads; unchanged without loads.

    Raises:
        RequestError: they are not loads of its experts.
    """
    if (found := loads_problem(loads, model)) is not None:
        raise RequestError(_FIELD, *found)
    return dataclasses.replace(model, expert_loads=loads) if loads and isinstance(model, ModelSpec) else model


def _number(word: str, text: str) -> float:
    try:
        load = float(word)
    except ValueError:
        load = math.nan
    if not math.isfinite(load):
        raise RequestError(_FIELD, f"{word[:40]!r} in {text} is not a number", _REMEDY)
    return load
