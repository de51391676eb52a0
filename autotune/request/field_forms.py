"""The written forms of request fields: lists of numbers, cluster shapes and commands, as text, tables or files."""

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from autotune.errors import RequestError
from search_spaces.clusters.cluster import ClusterSpec, with_shape
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model, ModelSpec
from search_spaces.quantities import Quantity, read_quantity
from search_spaces.training.expert_loads import MOST, Loads, loads_problem

Given = TypeVar("Given", bound=Model)
_LOADS_FIELD = "expert_loads"
_LOADS_REMEDY = "give numbers separated by commas, or the path of a file with a line of numbers for all layers or for each"


def read_loads(text: str | None, folder: Path = Path()) -> Loads:
    """Loads of experts, from numbers separated by commas or from a file in `folder` with a line of numbers for all layers with
    experts or for each of them; empty if nothing is given.

    Raises:
        RequestError: the file cannot be read, or it contains something else than numbers.
    """
    if text is None:
        return ()
    rows = words_of_lines(_LOADS_FIELD, text, r"[\d.,eE+\s-]", folder, _LOADS_REMEDY)
    return tuple(tuple(_load_number(word, text) for word in row) for row in rows)


def with_load_rows(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a request; numbers that are not in a list of their own are those of one row."""
    loads = fields.get(_LOADS_FIELD)
    flat = isinstance(loads, list | tuple) and any(isinstance(load, int | float) for load in loads)
    return {**fields, _LOADS_FIELD: [loads]} if flat else fields


def require_loads(loads: object) -> None:
    """Refuse anything but rows of numbers.

    Raises:
        RequestError: it is something else, or has too many rows or numbers.
    """
    rows = loads if isinstance(loads, tuple) else (loads,)
    for row in rows:
        if not isinstance(row, tuple) or not all(type(load) in (int, float) for load in row):
            raise RequestError(_LOADS_FIELD, f"{str(row)[:40]!r} is not a list of numbers", "give a list of lists of numbers")
    if max([len(rows), *map(len, rows)]) > MOST:
        raise RequestError(
            _LOADS_FIELD, f"has more than {MOST} rows or numbers in a row", "give a row for each layer with experts"
        )


def with_loads(model: Given, loads: Loads) -> Given:
    """The model whose tokens choose experts by these loads; unchanged without loads.

    Raises:
        RequestError: they are not loads of its experts.
    """
    if (problem := loads_problem(loads, model)) is not None:
        raise RequestError(_LOADS_FIELD, *problem)
    return dataclasses.replace(model, expert_loads=loads) if loads and isinstance(model, ModelSpec) else model


def _load_number(word: str, text: str) -> float:
    try:
        load = float(word)
    except ValueError:
        load = math.nan
    if not math.isfinite(load):
        raise RequestError(_LOADS_FIELD, f"{word[:40]!r} in {text} is not a number", _LOADS_REMEDY)
    return load


def read_lengths(text: str | None, folder: Path = Path()) -> tuple[int, ...]:
    """Lengths of the documents in tokens, from numbers separated by commas or from a file of numbers in `folder`; empty if
    nothing is given.

    Raises:
        RequestError: the file cannot be read, or it contains something else than numbers.
    """
    if text is None:
        return ()
    lengths_field = "document_lengths"
    lengths_remedy = "give numbers separated by commas, or the path of a file of numbers"
    words = [word for line in words_of_lines(lengths_field, text, r"[\d,\s]", folder, lengths_remedy) for word in line]
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise RequestError(lengths_field, f"{wrong[:40]!r} in {text} is not a number of tokens", lengths_remedy)
    return tuple(map(int, words))


def words_of_lines(field: str, text: str, characters: str, folder: Path, remedy: str) -> list[list[str]]:
    """The words of each line that has any: of `text` if it consists of `characters` (a regular expression of one of them), else
    of the file in `folder` that it names.

    Raises:
        RequestError: the file cannot be read, or there are no words.
    """
    written = text if re.fullmatch(f"{characters}*", text) else _file_text(field, folder / text, remedy)
    lines = [[word for word in re.split(r"[,\s]+", line) if word] for line in written.splitlines()]
    if not any(lines):
        raise RequestError(field, f"{text!r} contains no numbers", remedy)
    return [words for words in lines if words]


def _file_text(field: str, path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(field, f"{path} cannot be read ({error.strerror})", remedy) from error
    except UnicodeDecodeError as error:
        raise RequestError(field, f"{path} is not text", remedy) from error


FIELDS = tuple(item.name for item in dataclasses.fields(CommandModel))


def with_command(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with the command as a table, and with the model and engine that follow from it.

    A command is a list of words, one line in shell syntax, or a table with `arguments` and further fields.

    Raises:
        RequestError: it is none of these, or the request names another model or engine.
        ModelFormatError: one of its fields is invalid.
    """
    command = fields.get("command")
    if command is None:
        return dict(fields)
    table = _command_table(command)
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


def _command_table(command: Any) -> dict[str, Any]:
    if isinstance(command, CommandModel):
        return {name: getattr(command, name) for name in FIELDS}
    if isinstance(command, str | list | tuple):
        command = {"arguments": command}
    if not isinstance(command, Mapping):
        raise RequestError("command", f"{command!r} is not a command", "give its words as a list")
    for name in command:
        if name not in FIELDS:
            raise RequestError(f"command.{name}", "is not known", f"use some of {', '.join(FIELDS)}")
    words = command.get("arguments", ())
    if isinstance(words, str):
        try:
            words = shlex.split(words)
        except ValueError as error:
            raise RequestError(
                "command.arguments", f"{words!r} cannot be read ({error})", "give its words as a list"
            ) from error
    if not isinstance(words, list | tuple):
        raise RequestError("command.arguments", f"{words!r} is not a list of words", "give its words as a list")
    if isinstance(count := command.get("parameter_count"), str):
        parameter_count = read_quantity(Quantity.COUNT, count)
        if parameter_count is None or not 1 <= parameter_count < 1e16:  # more than any model has
            raise RequestError("command.parameter_count", f"{count!r} is not a number of parameters", "write 125M or 7B")
        command = {**command, "parameter_count": round(parameter_count)}
    for name in ("script_knobs", "environment_knobs"):
        if not isinstance(command.get(name, {}), Mapping):
            raise RequestError(f"command.{name}", f"{command[name]!r} is not a table", "give {NAME: [values]}")
    return {**command, "arguments": tuple(words)}


def parse_shape(name: str, shape: str) -> tuple[int, int]:
    """Parse to (nodes, devices per node).

    Raises:
        RequestError: `shape`, given as the field `name`, is not NODESxDEVICES.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,2})", shape) if isinstance(shape, str) else None
    if match is None:
        raise RequestError(name, f"{shape!r} is not NODESxDEVICES", "write 2x8 for 2 nodes of 8 devices")
    return int(match[1]), int(match[2])


def reshaped(cluster: ClusterSpec, name: str, shape: str) -> ClusterSpec:
    """The cluster with the nodes and devices per node of `shape`. Raises as `parse_shape`."""
    nodes, devices = parse_shape(name, shape)
    label = f"{cluster.name.partition(':')[0]}:{nodes}"
    return dataclasses.replace(with_shape(cluster, nodes, devices), name=label)


def shape_text(cluster: ClusterSpec) -> str:
    """The cluster's shape as NODESxDEVICES."""
    return f"{cluster.nodes}x{cluster.devices_per_node}"
