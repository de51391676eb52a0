"""Options shared by several commands."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.errors import RequestError
from autotune.logs import LogFormat
from autotune.question.field import Panel, parse_length, parse_size

DEFAULT_OUT = Path("best-config.json")


def parse_bytes(text: str | int) -> int:
    """The value of an option as bytes; see `parse_size`.

    Raises:
        typer.BadParameter: the text is not a size, or out of range.
    """
    return _parsed(parse_size, text)


def parse_tokens(text: str | int) -> int:
    """The value of an option as tokens; see `parse_length`.

    Raises:
        typer.BadParameter: the text is not a length.
    """
    return _parsed(parse_length, text)


def _parsed(parse: Callable[[str, str], int], text: str | int) -> int:
    try:
        return parse("", str(text))
    except RequestError as error:
        raise typer.BadParameter(f"{error.problem}; {error.remedy}") from error


Database = Annotated[
    str | None,
    typer.Option("--db", metavar="URL", help="Database: a URL or a file. Default: AUTOTUNE_DB, else your data folder."),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="URL of a service, instead of a database. Default: AUTOTUNE_URL, unless --db is given."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]
Job = Annotated[str | None, typer.Argument(metavar="JOB", help="A job's id or a unique prefix of it. [default: latest]")]
OneJob = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, a unique prefix of it, or `latest`.")]
Logs = Annotated[LogFormat, typer.Option("--log-format", help="Format of log lines.")]

# Options of jobs that are no fields of a request: `question_options` makes those.

RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ray cluster, HOST:PORT or auto. Default: AUTOTUNE_RAY_ADDRESS, RAY_ADDRESS, else a local Ray is started.",
    ),
]
PassEnvironment = Annotated[
    list[str] | None,
    typer.Option(
        "--pass-environment",
        metavar="NAME",
        help="An environment variable to pass to trials, in addition to a fixed list. May be repeated.",
        rich_help_panel=Panel.HARDWARE.value,
    ),
]
RayToInspect = Annotated[
    str | None,
    typer.Option(
        "--ray-address", metavar="ADDRESS",
        help="HOST:PORT. Default: AUTOTUNE_RAY_ADDRESS, RAY_ADDRESS, else the Ray that this machine belongs to.",
    ),
]  # fmt: skip
AllTrials = Annotated[int | None, typer.Option("--trials", min=1, metavar="N", help="Total number of search trials.")]
AllSeconds = Annotated[float | None, typer.Option("--max-seconds", metavar="SECONDS", help="Total seconds.")]
SET = {"metavar": "NAME=VALUE", "help": "A variable of a launch script, or an argument by its number. May be repeated."}
Set = Annotated[list[str] | None, typer.Option("--set", rich_help_panel=Panel.SEARCH.value, **SET)]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Your file of DeepSpeed, Accelerate, torchtitan or Megatron, measured as trial 0.",
        rich_help_panel=Panel.SEARCH.value,
    ),
]


def script_option(unit: str, text: str) -> Any:
    """An option of a user's own script."""
    return typer.Option(metavar=unit, help=text, rich_help_panel=Panel.SCRIPT.value)


Launcher = Annotated[
    str | None, script_option("NAME", "Launcher of the command: torchrun, deepspeed or accelerate. [default: torchrun]")
]
Folder = Annotated[
    str | None, script_option("PATH", "Working directory of the command on every node. [default: the current folder]")
]
Plugin = Annotated[
    str | None, script_option("NAME", "Accelerate plugin of the command: deepspeed or fsdp, with --launcher accelerate.")
]
Pattern = Annotated[
    str | None, script_option("REGEX", "Regular expression that reads the rate from the command's log, with named groups.")
]
ReportSeconds = Annotated[
    float | None,
    script_option("SECONDS", "Maximum time until the command's first report. [default: half the trial's limit]"),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="TOML file with any of these fields; options take precedence.", rich_help_panel=Panel.BASIC.value
    ),
]


def only_database(command: str, database: str | None, remedy: str = "") -> str | None:
    """The option `--db` of a command that needs a database.

    Raises:
        RequestError: AUTOTUNE_URL names a service and --db is missing. The default database would differ from that of the
            commands that use AUTOTUNE_URL.
    """
    if database is None and os.environ.get("AUTOTUNE_URL"):
        problem = "needs a database, but AUTOTUNE_URL names a service"
        raise RequestError(command, problem, f"{remedy}give --db, or unset AUTOTUNE_URL")
    return database


def given(**fields: Any) -> dict[str, Any]:
    """The fields that were given as options: those that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Parsed options of `autotune sweep`."""

    fields: dict[str, Any]
    """Fields of the request that were given as options, as `read_fields` takes them; `ranks` as text."""
    series: dict[str, Any]
    """Options of a series of jobs: price, rate, step."""
    imported: Path | None
    """A configuration of another framework that becomes the baseline."""
    stated: tuple[str, ...] = ()
    """NAME=VALUE of variables and arguments of a script that is imported."""
    out: Path
    config: Path | None
    resume: str | None
    database: str | None
    json: bool
    pass_environment: tuple[str, ...] = ()
    """Environment variables passed to trials in addition to a fixed list."""
    inside: bool = False
    """Whether the command is the whole run, which tunes itself."""
    share: float | None = None
    """Part of such a run's time that its search may cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFile:
    """The file that the fastest way is written to."""

    format: str
    dataset: str
    out: Path | None
    """None: standard output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOfWays:
    """The sweep of `--measure`."""

    trials: int
    words: tuple[str, ...]
    """The user's command for each rank; empty: that of the file's program."""
    config: Path | None
    """Further fields of the sweep, as of `autotune sweep --config`."""
    environment: tuple[str, ...]
    """Variables of the environment that trials get."""
