"""Reads recipes that are Python functions, without running them: literal arguments and assignments of attributes."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CHECKPOINTS = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
"""torchtitan's classes of activation checkpointing -> the modes of its TOML files."""
HELPERS = {"_with_global_batch_size": "train.global_batch_size"}
"""Functions of Megatron-Bridge that change a configuration -> the setting that their second argument gives."""
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonRecipe:
    """A function that returns a configuration."""

    name: str
    line: int
    settings: dict[str, Any]
    """With flat keys; `recipe` is the function's name."""


def python_recipes(text: str) -> list[PythonRecipe]:
    """Every function that returns a configuration, in the order of the text.

    A function that begins with another one of the file has that one's settings too.

    Raises:
        SyntaxError: the text is not Python.
    """
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    settings_by_name = {name: _settings(node, functions, ()) for name, node in functions.items()}
    return [
        PythonRecipe(name=name, line=functions[name].lineno, settings={**settings, "recipe": name})
        for name, settings in settings_by_name.items()
        if settings
    ]


def _settings(node: ast.FunctionDef, functions: dict[str, ast.FunctionDef], within: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    variable = ""
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                base = call.func.id if isinstance(call.func, ast.Name) else ""
                further: dict[str, Any] = {}
                if base in HELPERS and len(call.args) == 2 and isinstance(call.args[0], ast.Call):
                    further = dict(_value(call.args[1], HELPERS[base]))
                    call = call.args[0]
                    base = call.func.id if isinstance(call.func, ast.Name) else ""
                if base in functions and base not in within:
                    settings |= _settings(functions[base], functions, (*within, node.name)) | further
                    variable = name
                elif _is_configuration(call):
                    settings |= dict(_arguments(call, ""))
                    variable = name
                elif base.endswith(("_config", "_pretrain", "_recipe")):
                    variable = name
                if base == "model_registry" and call.args and isinstance(call.args[0], ast.Constant):
                    settings["model.flavor"] = call.args[0].value
            case ast.Assign(targets=[ast.Attribute() as target], value=value):
                path = _path(target)
                if path and path[0] == (variable or path[0]):
                    settings |= dict(_value(value, ".".join(path[1:])))
            case ast.Return(value=ast.Call() as call) if _is_configuration(call):
                settings |= dict(_arguments(call, ""))
    return settings


def _is_configuration(call: ast.Call) -> bool:
    name = _path(call.func)[-1:] or [""]
    return bool(call.keywords) and name[0] in ("Config", "ConfigContainer", "JobConfig")


def _arguments(call: ast.Call, before: str) -> Iterator[tuple[str, Any]]:
    for argument in call.keywords:
        if argument.arg is not None:
            yield from _value(argument.value, f"{before}{argument.arg}")


def _value(node: ast.expr, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, ast.Call):
        name = next((part for part in _path(node.func) if part in CHECKPOINTS), "")
        if name:
            yield f"{key}.mode", CHECKPOINTS[name]
        yield from _arguments(node, f"{key}.")
        return
    if isinstance(node, ast.Dict):
        for item, value in zip(node.keys, node.values, strict=True):
            if isinstance(item, ast.Constant):
                yield from _value(value, f"{key}.{item.value!s}")
        return
    value = _literal(node)
    if value is not _MISSING:
        yield key, value


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of products and sums of whole numbers."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        left_operand, right_operand = _literal(node.left), _literal(node.right)
        if isinstance(left_operand, int) and isinstance(right_operand, int):
            return left_operand * right_operand if isinstance(node.op, ast.Mult) else left_operand + right_operand
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return _MISSING


def _path(node: ast.expr) -> list[str]:
    """`cfg.model.size` -> its three names; empty: it is something else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := _path(node.value)):
        return [*before, node.attr]
    return []
