"""Options of the fields of a question, made from their declarations; the user's command after `--` and its options."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from autotune.cli import options
from autotune.errors import RequestError
from autotune.question.field import EVERY, ONE_AT_A_TIME, PLANNED, Panel, RequestField, declared_fields, option_name, plain_type

_SCRIPT: dict[str, Any] = {
    "launcher": options.Launcher,
    "plugin": options.Plugin,
    "folder": options.Folder,
    "trial_folder": Annotated[
        str | None,
        options.script_option(
            "WAY",
            "Where a trial of the command runs: in a new folder of links to the command's or a copy of it (link, copy), or in "
            "the command's own (none). [default: link on one host, else none]",
        ),
    ],
    "pattern": options.Pattern,
    "template": Annotated[
        Path | None,
        options.script_option(
            "FILE", "Configuration file with placeholders, such as config.json.in; {template} in the command is its path."
        ),
    ],
    "parameter_count": Annotated[
        str | None, options.script_option("COUNT", "Trained parameters of the command's model, such as 125M.")
    ],
    "script_knobs": Annotated[
        list[str] | None,
        options.script_option("NAME=A,B", "Values for the placeholder {NAME} of the command. May be repeated."),
    ],
    "environment_knobs": Annotated[
        list[str] | None,
        options.script_option("NAME=A,B", "Values of an environment variable of the command. May be repeated."),
    ],
    "report_seconds": options.ReportSeconds,
}
"""Part of the user's own script, which is the field `command` -> its option."""


class QuestionCommand(TyperCommand):
    """A command that takes fields of the question: those that name it. Its function reads them by `given_fields`."""

    _params: list[Any]
    _complete: bool

    @property
    def params(self) -> list[Any]:
        """Options of fields, then those of the function; made when they are needed, because declarations take time to load."""
        if not self._complete:
            self._complete, self._params = True, [*question_parameters(str(self.name)), *self._params]
        return self._params

    @params.setter
    def params(self, own: list[Any]) -> None:
        self._complete, self._params = False, own

    def invoke(self, ctx: Any) -> Any:
        """Set the fields apart from the function's parameters."""
        ctx.meta[__name__] = {item.name: ctx.params.pop(item.name) for item in question_parameters(str(self.name))}
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, a section for each panel in the order of `Panel`, then the other options; for --help."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *Panel, "Other options")}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                panel = getattr(parameter, "rich_help_panel", None) or "Other options"
                sections["Arguments" if parameter.param_type_name == "argument" else panel].append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def given_fields(context: typer.Context) -> dict[str, Any]:
    """The fields that were given as options, as `read_fields` takes them; an omitted flag is not given."""
    values = {name: value for name, value in context.meta[__name__].items() if value is not None and value != ()}
    script = {name: values.pop(name) for name in _SCRIPT if name in values}
    if context.command.name in SCRIPT_COMMANDS and (command := command_of(context, **script)) is not None:
        values["command"] = command
    return values


def asked_values(context: typer.Context) -> dict[str, Any]:
    """Every field that the command takes, with its default if it was not given, for a record of the command's options."""
    command = str(context.command.name)
    defaults = {name: default for name, declared, _, default in _fields_of(command) if command in declared.commands}
    values = {**defaults, **given_fields(context)}
    return values | ({"pins": tuple(values["pins"] or ())} if "pins" in values else {})


def _fields_of(command: str) -> Iterator[tuple[str, RequestField, Any, Any]]:
    if command in (*EVERY, "challenge", "profile"):
        from autotune.request.job_fields import JobFields

        return declared_fields(JobFields)
    from autotune.question.question import PlanningFields, QuestionFields

    return declared_fields(PlanningFields if command in PLANNED else QuestionFields)


@cache
def question_parameters(command: str) -> tuple[Any, ...]:
    """The argument and the options of the fields that a command takes, and of the user's own script if it takes one."""
    fields = [
        _parameter(name, _annotation(name, declared, kind, default, command))
        for name, declared, kind, default in _fields_of(command)
        if command in declared.commands
    ]
    return (*fields, *(_parameter(name, kind) for name, kind in _SCRIPT.items() if command in SCRIPT_COMMANDS))


def _parameter(name: str, annotation: Any) -> Any:
    """The parameter that typer makes from one annotation."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command()
    def taking(value: annotation = None) -> None:
        pass

    parameter = typer.main.get_command(app).params[0]
    parameter.name = name
    if parameter.opts == ["--value"]:
        parameter.opts = [option_name(name)]
    return parameter


def _annotation(name: str, declared: RequestField, kind: Any, default: Any, command: str) -> Any:
    shown: dict[str, Any] = {"metavar": declared.unit, "help": _help(declared, default, command)}
    if name == "model" and command not in ("lint", "carry", "challenge"):
        return Annotated[str | None, typer.Argument(**shown)]
    shown["rich_help_panel"] = declared.panel.value
    plain, words = plain_type(kind), option_name(name)
    if plain is bool:
        return Annotated[bool | None, typer.Option(f"{words}/--no-{words[2:]}" if default is True else words, **shown)]
    if name == "ranks" and command == "sweep":  # of a series: several, with commas
        plain = str
    elif declared.unit == "BYTES":
        shown["parser"] = options.parse_bytes
    elif declared.unit == "TOKENS":
        shown["parser"] = options.parse_tokens
    elif plain is int and command not in EVERY and declared.least is not None:
        shown["min"] = int(declared.least)
    option = declared.option or (list[str] if name in ONE_AT_A_TIME else plain)
    also = ("--on",) if (name, command) == ("cluster", "fit") else ()
    return Annotated[option | None, typer.Option(words, *also, **shown)]


def _help(declared: RequestField, default: Any, command: str) -> str:
    """The help, and ` [default: 20]` if there is a default worth showing."""
    text = declared.help_of(command)
    if "default" in text.lower() or default is False:
        return text
    default_text = f"{default:g}" if isinstance(default, float) else "" if default in (None, "", ()) else str(default)
    shown = (declared.shown_default or default_text).strip()
    return f"{text} [default: {shown}]" if shown else text


SCRIPT_COMMANDS = ("sweep", "submit", "check")
"""Our commands whose question may be a user's command."""
KEY = "command"


def without_command(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split our arguments from the words of the user's command, in which our options are not parsed."""
    words = list(arguments)
    # Our commands that accept a user's command.
    if not words or words[0] not in (*SCRIPT_COMMANDS, "verify", "fit") or "--" not in words:
        return words, {}
    at = words.index("--")
    return words[:at], {KEY: words[at + 1 :]}


def command_of(context: typer.Context, **options: Any) -> dict[str, Any] | None:
    """The field `command` of a request; None: there is none.

    Raises:
        RequestError: an option about a command is given without a command, or cannot be parsed.
    """
    settings = {name: value for name, value in options.items() if value is not None}
    words = (context.obj or {}).get(KEY)
    if words is None:
        if settings:
            name = next(iter(settings))
            raise RequestError(name, "requires a command", "write the command after --, as in -- python train.py")
        return None
    if (template := settings.pop("template", None)) is not None:
        try:
            settings |= {"template": template.read_text(encoding="utf-8"), "template_name": template.name.removesuffix(".in")}
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError("command.template", f"{template} cannot be read ({error})", "name a text file") from error
    for name in ("script_knobs", "environment_knobs"):
        if name in settings:
            settings[name] = dict(_values(name, text) for text in settings[name])
    return {"arguments": words, "folder": str(Path.cwd()), **settings}


def _values(field: str, text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise RequestError(f"command.{field}", f"{text!r} is not NAME=VALUES", "write for example num_workers=0,2,4")
    return name.strip(), [value.strip() for value in values.split(",")]
