"""Options of a tuning request, generated from the declarations of its fields (`autotune.request.request.JobRequest`)."""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.options import parse_bytes
from autotune.request.field import Panel, RequestField
from autotune.request.field_names import ONE_AT_A_TIME, option_name
from autotune.request.request import declared_fields, plain_type

PARSED: dict[str, type[Any]] = {"document_lengths": str, "failures": Path, "data_path": Path}
"""Field -> the type of its option, if the command parses the value itself."""
EXCLUDED = frozenset({"pins", "baseline"})
"""Fields whose options the commands declare themselves, because they are merged with a file's values in a special way."""


def with_request_options(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `request` by the options of the request fields that it accepts.

    The command receives the given fields; an omitted flag is not given.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = list(inspect.signature(function).parameters.values())
        position = next(index for index, parameter in enumerate(parameters) if parameter.name == "request")
        options = dict(_options(command))
        made = [
            inspect.Parameter(_word(name), inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]

        @functools.wraps(function)
        def called(**values: Any) -> None:
            given = {name: value for name in options if (value := _read(name, values.pop(_word(name)))) is not None}
            function(**values, request=given)

        del called.__wrapped__
        signature = inspect.Signature([*parameters[:position], *made, *parameters[position + 1 :]])
        called.__signature__ = signature  # type: ignore[attr-defined]
        hints = inspect.get_annotations(function, eval_str=True)
        called.__annotations__ = {name: hint for name, hint in hints.items() if name != "request"} | {
            one.name: one.annotation for one in made
        }
        return called

    return decorate


def _options(command: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, declared, kind, default in declared_fields():
        if command not in declared.commands or name in EXCLUDED:
            continue
        text = declared.help_of(command)
        if name == "model":
            yield name, (Annotated[str | None, typer.Argument(metavar=declared.unit, help=text)], None)
            continue
        plain = plain_type(kind)
        shown: dict[str, Any] = {"help": text + _default_text(declared, default, text), "rich_help_panel": declared.panel.value}
        if plain is bool:
            on = option_name(name)
            words = (f"{on}/--no-{on[2:]}",) if default else (on,)
            yield name, (Annotated[bool | None, typer.Option(*words, **shown)], None)
            continue
        named: dict[str, Any] = {"metavar": declared.unit, **shown}
        several = name in ONE_AT_A_TIME
        if name == "memory_limit":
            named["parser"] = parse_bytes
        sizes = name == "ranks" and command == "sweep"  # of a series: several, with commas
        own = list[str] if several else str if sizes else PARSED.get(name, plain)
        yield name, (Annotated[own | None, typer.Option(option_name(name), **named)], None)


def _default_text(declared: RequestField, default: Any, text: str) -> str:
    """` [default: 20]`, to append to the help; empty if there is no default worth showing."""
    if "default" in text.lower() or default is False:
        return ""
    own = f"{default:g}" if isinstance(default, float) else "" if default in (None, "", ()) else str(default)
    shown = (declared.shown_default or own).strip()
    return f" [default: {shown}]" if shown else ""


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
