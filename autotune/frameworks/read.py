"""Reads a configuration file of another framework, or a best-config document, and detects which framework it is."""

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import AutotuneError, RequestError, UnknownFormatError
from autotune.frameworks.accelerate_checks import ACCELERATE
from autotune.frameworks.best_config import request_of, require_schema_version, stated_of
from autotune.frameworks.deepspeed_checks import DEEPSPEED
from autotune.frameworks.framework import Framework
from autotune.frameworks.imported import (
    REMEDY,
    Imported,
    flat,
    named_file,
    read_table,
    read_table_and_repeated,
    read_text,
    reads_one_file,
    yaml_value,
)
from autotune.frameworks.megatron_checks import MEGATRON, MEGATRON_BRIDGE
from autotune.frameworks.shell import read_options
from autotune.frameworks.shell_values import decided_by, is_open
from autotune.frameworks.torchtitan_checks import TORCHTITAN
from autotune.frameworks.trainer_launch import TRAINERS, launched, trainer_format
from search_spaces.errors import KnobValueError, SearchSpaceError
from search_spaces.file_kinds import UNREAD, kind_of
from search_spaces.knob_values import check_value
from search_spaces.plugins import PluginGroup, load_plugins
from search_spaces.trial_config import TrialConfig

BEST_CONFIG = frozenset({"schema_version", "best"})
FRAMEWORKS: Mapping[str, Framework] = {
    **{framework.name: framework for framework in (DEEPSPEED, TORCHTITAN, MEGATRON, MEGATRON_BRIDGE, ACCELERATE)},
    **TRAINERS,
}
FORMATS = tuple(FRAMEWORKS)
TABLES = (".json", ".yaml", ".yml", ".toml")
OFF = re.compile(r"(^|\.)no_(?=\w+$)")
"""Before a switch of tyro that is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A configuration as it is written in a file."""

    format: str
    """One of `FORMATS`; empty: none of them."""
    name: str
    """The file's name, with the function's if the file has several."""
    path: Path
    content: Mapping[str, Any]
    """Its settings, as tables or with flat keys."""
    open: Mapping[str, str] = field(default_factory=dict)
    """Setting whose value is decided when the file runs -> what decides it."""
    sourced: tuple[str, ...] = ()
    """Files that a script sources, which are not read: they may set and export variables."""
    repeated: tuple[str, ...] = ()
    """Keys that one table of a JSON file states twice."""
    stated: Mapping[str, str] = field(default_factory=dict)
    """Variables and arguments of a script, with the user's values."""
    ranks: int | None = None
    """Ranks that a script starts without a launcher; None: not known."""
    stray: tuple[str, ...] = ()
    """Options of a script that are no part of its launch."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Setting -> the line where it is looked for first; empty: anywhere."""

    def read(self) -> Imported:
        """Read it as knobs by its framework; a file of DeepSpeed with a value that is no knob's has none.

        Raises:
            RequestError: it is of no readable version, or has an invalid value.
        """
        # Files that these name are looked for beside them.
        source = str(self.path) if self.format in (ACCELERATE.name, *TRAINERS) else self.name
        imported = FRAMEWORKS[self.format].read(self.content, source)
        return replace(imported, repeated=self.repeated, started_ranks=self.ranks)

    def imported(self) -> Imported:
        """Read it as knobs.

        Raises:
            RequestError: it has none of the formats, or an invalid value.
        """
        if not self.format:
            return _other(self)
        imported = self.read()
        if imported.unreadable is not None:
            raise imported.unreadable
        return imported.noted(*self.notes())

    def notes(self) -> Iterator[str]:
        """A line for everything that is decided when the file runs."""
        yield from (f"{name} ({by}): decided when the script runs" for name, by in self.open.items())
        yield from (f"{option}: bash takes it for a command: a comment or an end of line before it" for option in self.stray)
        yield from (f"{file} is sourced and not read: variables that it sets are not known" for file in self.sourced)


def read_imported(path: Path, stated: Mapping[str, str] | None = None) -> Imported:
    """Read the file's only configuration; its keys decide the format.

    Raises:
        RequestError: the file cannot be read, has none of the formats, has several configurations, or has an invalid value.
    """
    recipes = read_written(path, stated=stated)
    if len(recipes) > 1:
        names = ", ".join(recipe.name for recipe in recipes[:5])
        raise RequestError("from", f"{path} has several recipes ({names} …)", "give a file with one of them")
    return recipes[0].imported()


def read_written(
    path: Path, format_name: str = "", stated: Mapping[str, str] | None = None, beside: Path | None = None
) -> list[Written]:
    """The configurations of a file: one, but for a Python file with several functions.

    Args:
        path: the file.
        format_name: one of `FORMATS`; empty: the file's content decides.
        stated: variables and arguments of a script, with the user's values.
        beside: the script whose neighbours it may source, if that is another one.

    Raises:
        RequestError: the file cannot be read, or is neither a table, nor a script with options of a known framework, or has
            another format than the given one.
        UnknownFormatError: there is no such format.
    """
    if format_name and format_name not in FORMATS:
        raise UnknownFormatError("format", f"{format_name!r} is not known", f"use auto, {', '.join(FORMATS)}")
    if stated and path.suffix in (".py", *TABLES):
        raise RequestError("set", f"{path} is no launch script", "leave it out")
    if path.suffix == ".py":
        recipes = _python(path, format_name)
    elif (table := _table_of(path, format_name)) is None:
        recipes = [_script(path, format_name, beside or path, stated or {})]
    else:
        content, repeated = table
        table_format = _format_of_table(content)
        if format_name and table_format not in ("", format_name):
            raise RequestError("format", f"{path} is of {table_format}, not of {format_name}", f"give {table_format}, or auto")
        recipes = [
            Written(format=format_name or table_format, name=path.name, path=path, content=content, repeated=repeated)
        ]  # fmt: skip
    for recipe in recipes:
        try:
            json.dumps(dict(flat(recipe.content)), ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise RequestError("from", f"{path} has a text that is not Unicode", r"leave out escapes such as \ud800") from None
        if format_name:
            _require_settings(recipe)
    return recipes


def _table_of(path: Path, format_name: str) -> tuple[Mapping[str, Any], tuple[str, ...]] | None:
    """The file's table and its repeated keys; None: it is a script. A suffix that names no table is a hint only.

    Raises:
        RequestError: as `read_table`, of a file whose suffix or given format says that it is a table.
    """
    if path.suffix in TABLES:
        return read_table_and_repeated(path)
    of_tables = format_name in (DEEPSPEED.name, ACCELERATE.name)
    text = read_text(path).lstrip()
    # Characters of a file whose suffix names no table; a longer one is a script or a log.
    if (text.startswith("#!") or len(text) > 500_000) and not of_tables:
        return None
    try:
        content, repeated = read_table_and_repeated(path)
    except RequestError:
        if of_tables or text.startswith("{"):
            raise
        return None
    known = of_tables or _format_of_table(content) or (not format_name and text.startswith("{"))
    return (content, repeated) if known else None


def _require_settings(written: Written) -> None:
    """Refuse a file without any setting of the format that it is said to have: it would pass every check."""
    prefixes = FRAMEWORKS[written.format].prefixes
    if not any(key.startswith(prefixes) for key in (*dict(flat(written.content)), *written.open)):
        raise _without_setting(written.path, written.format)


def _without_setting(path: Path, format_name: str) -> RequestError:
    return RequestError("format", f"{path} has no setting of {format_name}", "give the format that it has, or auto")


def named(error: AutotuneError | SearchSpaceError, field: str) -> AutotuneError | SearchSpaceError:
    """The error of a file that is the value of `field`: where recipes are read for sweeps, it is that of --from."""
    is_file = isinstance(error, RequestError) and error.field == "from"
    return RequestError(field, error.problem, error.remedy) if is_file else error


def _format_of_table(content: Mapping[str, Any]) -> str:
    if content.keys() >= BEST_CONFIG or kind_of(content).endswith(UNREAD):  # some settings are spelled as in formats below
        return ""
    if kind := trainer_format(content):
        return kind
    if content.keys() & {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config", "megatron_lm_config"}:
        return ACCELERATE.name
    sections = {name for name in ("bf16", "fp16") if isinstance(content.get(name), Mapping)}  # other formats have switches
    if sections or content.keys() & {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}:
        return DEEPSPEED.name
    return _format_of_keys(dict(flat(content)))


def _format_of_keys(settings: Collection[str]) -> str:
    """torchtitan, megatron or megatron-bridge, by flat keys; empty: none of them."""
    tables = ("training.", "parallelism.", "activation_checkpoint.")
    if any(key.startswith(tables) for key in settings):
        return TORCHTITAN.name
    if {"--tensor-model-parallel-size", "--num-layers", "--micro-batch-size", "--model-parallel-size"} & set(settings):
        return MEGATRON.name
    if any(re.fullmatch(r"model\.(\w+_parallel_size|recompute_\w+)|train\.(micro|global)_batch_size", key) for key in settings):
        return MEGATRON_BRIDGE.name
    return ""


def _other(written: Written) -> Imported:
    """Read one of our own best configurations, or a plug-in's format."""
    content, path = written.content, written.path
    if content.keys() >= BEST_CONFIG:
        return from_best_config(content, path.name)
    for importer in load_plugins(PluginGroup.IMPORTERS).values():
        imported: Imported | None = importer(content, path.name)
        if imported is not None:
            return imported
    raise RequestError("from", unknown_kind(written), REMEDY)


def unknown_kind(written: Written) -> str:
    """What a file of none of the formats is."""
    kind = kind_of(written.content)
    return f"{written.path} is {kind}" if kind else f"{written.path} has none of the keys of DeepSpeed or Accelerate"


def _python(path: Path, format_name: str) -> list[Written]:
    try:
        recipes = python_recipes(read_text(path))
    except SyntaxError as error:
        raise RequestError("from", f"{path} is not Python ({error.msg}, line {error.lineno})", REMEDY) from error
    except (RecursionError, MemoryError):
        raise RequestError("from", f"{path} is nested too deeply", REMEDY) from None
    written_recipes = []
    for recipe in recipes:
        kind = format_name or _format_of_keys(recipe.settings)
        if kind:
            lines = {"recipe": recipe.line}
            name = f"{path.name}:{recipe.name}"
            written_recipes.append(Written(format=kind, name=name, path=path, content=recipe.settings, lines=lines))
    if not written_recipes:
        raise RequestError("from", f"{path} is Python source without a function that returns a configuration", REMEDY)
    return written_recipes


def _script(path: Path, format_name: str, beside: Path, stated: Mapping[str, str]) -> Written:
    text = read_text(path)
    try:
        script = read_options(text, None if reads_one_file() else beside, stated)
    except RecursionError:
        raise RequestError("from", f"{path} is nested too deeply", REMEDY) from None
    if script.unused and beside == path:
        names = ", ".join(script.unused)
        raise RequestError("set", f"{path.name} does not read {names}, or sets it itself", "state what the script leaves open")
    settings: dict[str, Any] = script.settings
    # Overrides of Megatron-Bridge: `model.tensor_model_parallel_size=4`.
    matches = (re.fullmatch(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.+)", word, re.DOTALL) for word in script.words)
    overrides = {match[1]: _override(match[2]) for match in matches if match}
    # Packages that start with a program whose options are not read.
    package = re.match(r"(?:openrlhf|verl|xtuner)(?=\.)", script.program)
    if package or any(key.startswith("trainer.") for key in overrides):
        raise RequestError("from", f"{path} starts a program of {package[0] if package else 'NeMo'}, which is not read", REMEDY)
    undecided = {key: by for key, by in script.open.items() if not key.startswith("$")}
    for key in [key for key, value in overrides.items() if isinstance(value, str) and is_open(value)]:
        undecided[key] = decided_by(overrides.pop(key))
    tables = {_tyro(key): value for key, value in settings.items() if key.startswith("--")}
    settings_tables = [settings, tables, overrides]
    kind = format_name or next(
        (
            kind
            for options in settings_tables
            for keys in (options, [*options, *undecided], [*options, *map(_tyro, undecided)])
            if (kind := _format_of_keys(keys))
        ),
        "",
    )
    content: Mapping[str, Any]
    if kind in ("", *TRAINERS):
        kind, content = launched(script, path, kind)
    # Options of Megatron-LM that a file with none of the degrees leaves to the script that launches it.
    degrees = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--sequence-parallel")
    match kind:
        case _ if kind in TRAINERS:
            stating = {option.key for option in FRAMEWORKS[kind].options}
            undecided = {_tyro(key): by for key, by in undecided.items() if _tyro(key) in stating or not key.startswith("-")}
            content = {**dict.fromkeys(stating & undecided.keys()), **content}  # not stated, and not left to a default either
        case "megatron-bridge":
            recipe = str(settings.get("--recipe", "")).split()[:1]  # overrides follow it
            content = {**({"recipe": recipe[0]} if recipe else {}), **overrides}
        case "torchtitan":
            table_settings = {key: value for key, value in settings.items() if not key.startswith("--")}
            base = _base(path, tables)  # takes its own options out of `tables`, so it comes first
            switched = {  # by tyro's switches: `--compile.no_enable` means `compile.enable = false`
                OFF.sub(r"\1", key): False if OFF.search(key) and value is True else value for key, value in tables.items()
            }
            content = {**base, **switched, **table_settings}
            undecided = {_tyro(key): by for key, by in undecided.items()}
        case "megatron":
            content = settings
            if not script.program and not set(degrees[:2]) & {*settings, *undecided}:  # a part of a launch
                undecided |= {key: "what launches these options" for key in degrees if key not in {*settings, *undecided}}
        case _:
            content = {}
    has_settings = "recipe" in content or kind in TRAINERS or _format_of_keys([*content, *undecided]) == kind
    if not (kind and has_settings):
        none = RequestError("from", f"{path} has no options of a known framework", REMEDY)
        raise _without_setting(path, kind) if format_name else none
    undecided |= {key: by for key, by in script.open.items() if key.startswith("$")}
    return Written(
        format=kind, name=path.name, path=path, content=content, open=undecided, sourced=tuple(script.sourced), stated=stated,
        stray=script.stray, ranks=script.ranks,
    )  # fmt: skip


def _tyro(key: str) -> str:
    """An option of torchtitan as a setting."""
    return key.removeprefix("--").replace("-", "_")


def _override(text: str) -> Any:
    """The value of an override, which is YAML; what is not YAML stays text."""
    try:
        return yaml_value(text)
    except (ValueError, OverflowError, yaml.YAMLError, RecursionError):
        return text


def _base(path: Path, tables: dict[str, Any]) -> dict[str, Any]:
    """The TOML file that torchtitan's options name, if it is there: options override it."""
    name, recipe = tables.pop("job.config_file", None), tables.pop("config", None)
    if name is not None and (file := named_file(path, str(name))) is not None:
        return dict(flat(read_table(file)))
    return {} if recipe is None else {"recipe": recipe}


def from_best_config(content: Mapping[str, Any], source: str) -> Imported:
    """Read the document: its best configuration, its global batch size and its ranks.

    Raises:
        RequestError: it lacks a part, or a value is outside its knob's domain.
        BestConfigError: it has another schema version, or its request cannot be read.
    """
    require_schema_version(content, source)
    try:
        values, ranks, engine = content["best"]["config"], content["launch"]["world_size"], content["engine"]
        knobs = {name: check_value(name, value) for name, value in values.items()}
        config = TrialConfig().replace(knobs)
        knobs = config.differences(TrialConfig())
    except (KeyError, TypeError) as error:
        raise RequestError("from", f"{source} lacks {error}", "write it again with `autotune export`") from error
    except KnobValueError as error:
        raise RequestError("from", f"{source}: {error}", error.remedy) from error
    request = request_of(content)
    return Imported(
        knobs=knobs,
        global_batch_size=request.global_batch_size,
        ranks=ranks,
        engine=engine,
        hyperparameters=stated_of(request, config),
    )


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
    settings_by_name: dict[str, dict[str, Any]] = {}
    return [
        PythonRecipe(name=name, line=node.lineno, settings={**settings, "recipe": name})
        for name, node in functions.items()
        if (settings := _settings(node, functions, settings_by_name))
    ]


def _settings(
    node: ast.FunctionDef, functions: dict[str, ast.FunctionDef], settings_by_name: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The settings of a function; empty within itself. `settings_by_name`: those of the functions that were read before."""
    if node.name in settings_by_name:
        return settings_by_name[node.name]
    settings: dict[str, Any] = {}
    settings_by_name[node.name] = {}
    variable = ""
    # Functions of Megatron-Bridge that change a configuration -> the setting that their second argument gives.
    helpers = {"_with_global_batch_size": "train.global_batch_size"}
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call):
                base = call.func.id if isinstance(call.func, ast.Name) else ""
                further: dict[str, Any] = {}
                if base in helpers and len(call.args) == 2 and isinstance(call.args[0], ast.Call):
                    further = dict(_value(call.args[1], helpers[base]))
                    call = call.args[0]
                    base = call.func.id if isinstance(call.func, ast.Name) else ""
                if base in functions and base != node.name:
                    settings |= _settings(functions[base], functions, settings_by_name) | further
                    variable = name
                elif _is_configuration(call):
                    settings |= dict(_arguments(call, ""))
                    variable = name
                elif base.endswith(("_config", "_pretrain", "_recipe")):
                    variable = name
                settings |= dict(_registry(call))
            case ast.Assign(targets=[ast.Attribute() as target], value=value):
                path = _path(target)
                if path and path[0] == (variable or path[0]):
                    settings |= dict(_value(value, ".".join(path[1:])))
            case ast.Return(value=ast.Call() as call) if _is_configuration(call):
                settings |= dict(_arguments(call, ""))
    settings_by_name[node.name] = settings
    return settings


def _is_configuration(call: ast.Call) -> bool:
    name = _path(call.func)[-1:] or [""]
    return bool(call.keywords) and name[0] in ("Config", "ConfigContainer", "JobConfig")


def _arguments(call: ast.Call, before: str) -> Iterator[tuple[str, Any]]:
    for argument in call.keywords:
        if argument.arg is not None:
            yield from _value(argument.value, f"{before}{argument.arg}")


def _value(node: ast.expr, key: str) -> Iterator[tuple[str, Any]]:
    # torchtitan's classes of activation checkpointing -> the modes of its TOML files.
    checkpoints = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget"}
    if isinstance(node, ast.Call):
        yield from _registry(node)
        name = next((part for part in _path(node.func) if part in checkpoints), "")
        if name:
            yield f"{key}.mode", checkpoints[name]
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


def _registry(call: ast.Call) -> Iterator[tuple[str, Any]]:
    """The flavour and the converters of torchtitan's `model_registry("8B", converters=[Float8LinearConverter.Config()])`."""
    if _path(call.func)[-1:] != ["model_registry"]:
        return
    if call.args and isinstance(call.args[0], ast.Constant):
        yield "model.flavor", call.args[0].value
    converters = [ast.unparse(argument.value) for argument in call.keywords if argument.arg == "converters"]
    if converters:
        yield "model.converters", ["float8"] if "Float8" in converters[0] else re.findall(r"(\w+)Converter", converters[0])
        if recipe := re.search(r"Float8Linear\w*\(.*recipe_name='(\w+)'", converters[0]):
            yield "float8.recipe_name", recipe[1]


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of products and sums of whole numbers of 64 bits."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
        left_operand, right_operand = _literal(node.left), _literal(node.right)
        if isinstance(left_operand, int) and isinstance(right_operand, int):
            value = left_operand * right_operand if isinstance(node.op, ast.Mult) else left_operand + right_operand
            return value if abs(value) < 2**63 else _MISSING
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
