"""Options of a tuning request, from the generated file of `autotune.request.generated`: the declarations take time to load."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.command_words import command_of
from autotune.cli.options import parse_bytes
from autotune.request.field import ONE_AT_A_TIME, FieldOption, Panel, option_name

FILE = Path(__file__).with_name("request_fields.json")
TYPES: Mapping[str, Any] = {
    "text": str, "texts": list[str], "whole": int, "number": float, "bytes": int, "path": Path, "flag": bool
}  # fmt: skip
SCRIPT_OPTIONS: dict[str, Any] = {
    "launcher": options.Launcher,
    "plugin": options.Plugin,
    "folder": options.Folder,
    "pattern": options.Pattern,
    "parameter_count": options.ParameterCount,
    "script_knob": options.ScriptKnobs,
    "environment_knob": options.EnvironmentKnobs,
    "report_seconds": options.ReportSeconds,
}
"""Parameter -> option about the user's own script, which is the request's field `command`."""


def with_request_options(command: str, script: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `request` by the options of the request fields that it accepts.

    The command receives the given fields; an omitted flag is not given. `script`: it also accepts the user's own script, which
    is the field `command`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(function).parameters.values())
        position = next(index for index, parameter in enumerate(parameters) if parameter.name == "request")
        accepted = {_word(option.name): option for option in _field_options() if command in option.helps}
        annotations = {word: _annotation(option, command) for word, option in accepted.items()}
        script_options = SCRIPT_OPTIONS if script else {}
        option_parameters = [
            inspect.Parameter(word, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
            for word, annotation in (annotations | script_options).items()
        ]
        first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

        @functools.wraps(function)
        def called(context: typer.Context, **values: Any) -> None:
            fields = options.given(**{option.name: _read(option.name, values.pop(word)) for word, option in accepted.items()})
            if script:
                script_fields = {word: field for field, word in ONE_AT_A_TIME.items()}
                words = {script_fields.get(word, word): values.pop(word) for word in script_options}
                fields |= options.given(command=command_of(context, **words))
            function(**values, request=fields)

        del called.__wrapped__
        listed = [first, *parameters[:position], *option_parameters, *parameters[position + 1 :]]
        called.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
        hints = inspect.get_annotations(function, eval_str=True)
        called.__annotations__ = {name: hint for name, hint in hints.items() if name != "request"} | {
            option_parameter.name: option_parameter.annotation for option_parameter in (first, *option_parameters)
        }
        return called

    return decorate


@functools.cache
def _field_options() -> tuple[FieldOption, ...]:
    return tuple(FieldOption(**option) for option in json.loads(FILE.read_text(encoding="utf-8")))


def _annotation(option: FieldOption, command: str) -> Any:
    if option.name == "model":
        return Annotated[str | None, typer.Argument(metavar=option.unit, help=option.helps[command])]
    shown: dict[str, Any] = {"help": option.helps[command], "rich_help_panel": option.panel}
    words = option_name(option.name)
    if option.kind == "flag":
        return Annotated[bool | None, typer.Option(f"{words}/--no-{words[2:]}" if option.on else words, **shown)]
    if option.kind == "bytes":
        shown["parser"] = parse_bytes
    sizes = option.name == "ranks" and command == "sweep"  # of a series: several, with commas
    kind: Any = str if sizes else TYPES[option.kind]
    return Annotated[kind | None, typer.Option(words, metavar=option.unit, **shown)]


def _word(field: str) -> str:
    """The name of the option's parameter."""
    return ONE_AT_A_TIME.get(field, field)


def _read(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value) or None
    return str(value) if name == "data_path" and value is not None else value


class PanelCommand(typer.core.TyperCommand):
    """A command whose help groups its options by panel, the basic ones first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then a section for each panel, then the rest."""
        arguments, sections = [], dict[str, list[tuple[str, str]]]()
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or "", []).append(record)
        ordered = [*(panel.value for panel in Panel), *(name for name in sections if name not in set(Panel))]
        for title, records in (
            ("Arguments", arguments),
            *((name or "Other options", sections.get(name, [])) for name in ordered),
        ):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
