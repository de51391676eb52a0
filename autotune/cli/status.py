"""Exit statuses, errors as one line on standard error, and the documents of `--json`."""

import json
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import typer

from autotune.errors import RequestError
from autotune.installed import missing_line
from autotune.output import write_whole
from autotune.text.visible_text import visible, visible_line
from search_spaces.plain import finite

PROGRAM = "autotune"


class Status(IntEnum):
    """Exit statuses of commands."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOTHING_FEASIBLE = 3
    INTERRUPTED = 130


def exit_status(app: typer.Typer, arguments: Sequence[str], further: dict[str, Any]) -> int:
    """Run the application. Our own errors become one line and a status; other exceptions keep their traceback.

    `further`: additional data for the commands' context.
    """
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without these characters: bars become question marks
    try:
        # The name is given because shell completion depends on it.
        result = app(args=list(arguments), prog_name=PROGRAM, standalone_mode=False, obj=further)
    except typer.TyperException as error:
        wrong = _wrong_value(error)
        return _fail(_usage_text(error) if wrong is None else str(wrong), Status.USAGE, as_json, wrong or "UsageError")
    except typer.Abort:
        return _fail("interrupted", Status.INTERRUPTED, as_json, "Interrupted")
    except ModuleNotFoundError as error:
        line = missing_line(error)
        if line is None:
            raise
        return _fail(line, Status.USAGE, as_json, error)
    except RecursionError as error:
        return _fail("input: is nested too deeply; simplify the file", Status.USAGE, as_json, error)
    except Exception as error:
        status = status_of(error)
        if status is None:
            if as_json:  # standard output is a document even then
                _write_error(f"{type(error).__name__}: {error}", Status.FAILURE, error)
            raise
        return _fail(str(error), status, as_json, error)
    if result == Status.INTERRUPTED and not isinstance(result, Status):
        return _fail("interrupted", Status.INTERRUPTED, as_json, "Interrupted")  # before the command began: it says so itself
    return result if isinstance(result, int) else Status.OK


def status_of(error: Exception) -> Status | None:
    """The status of one of our errors; None: it is not ours."""
    # Imported here because `autotune --help` must not load these packages.
    from autotune.errors import AutotuneError, JobCutShortError, NoBestError, NothingFeasibleError
    from executor.errors import DataError, ExecutorError, FactoryError, WeightsError
    from search_spaces.errors import SearchSpaceError
    from storage.errors import LeaseHeldError, LeaseLostError, StorageError

    match error:
        case NothingFeasibleError():
            return Status.NOTHING_FEASIBLE
        case NoBestError() | JobCutShortError() | LeaseHeldError() | LeaseLostError():
            return Status.FAILURE
        case AutotuneError() | SearchSpaceError() | StorageError() | FactoryError() | DataError() | WeightsError():
            return Status.USAGE
        case ExecutorError():
            return Status.FAILURE
        case _:
            return _status_of_client(error)


def _status_of_client(error: Exception) -> Status | None:
    """The same for an error of the client, which is only checked if it is already imported, because it needs httpx2."""
    client = sys.modules.get("autotune.client.errors")
    if client is None or not isinstance(error, client.ServiceError):
        return None
    if isinstance(error, client.UnreachableError | client.UnavailableError):
        return Status.FAILURE
    # Refusals by the service are user errors; failures of the service itself have the base class.
    return Status.FAILURE if type(error) is client.ServiceError else Status.USAGE


class UsageError(Exception):
    """A value of an option, or an argument, that cannot be read."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}; {remedy}")
        self.field, self.problem, self.remedy = field, problem, remedy


def _wrong_value(error: typer.TyperException) -> UsageError | None:
    """The usage error with field, problem and remedy, if it is a value of the wrong type or beyond a limit."""
    parameter, read_errors = getattr(error, "param", None), getattr(error.__cause__, "errors", None)
    if parameter is None:
        return None
    name = next((word for word in parameter.opts if word.startswith("--")), str(parameter.name))
    field = name.removeprefix("--").replace("-", "_")
    if isinstance(error.__cause__, RequestError):
        return UsageError(field, error.__cause__.problem, error.__cause__.remedy)
    if read_errors is None:
        return None
    first = read_errors()[0]
    kind = {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(str(first["type"]).partition("_")[0])
    limits = [
        text.format(first.get("ctx", {})[name])
        for name, text in {"ge": "at least {}", "gt": "more than {}", "le": "at most {}", "lt": "less than {}"}.items()
        if name in first.get("ctx", {})
    ]
    expected = kind or next(iter(limits), None)
    if expected is None:
        return None
    path = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
    meaning = str(getattr(parameter, "help", "") or "").partition(".")[0]
    described = f" ({meaning[:1].lower()}{meaning[1:]})" if kind and " " in meaning else ""
    return UsageError(field, f"{first['input']!r} is not {expected}{described}", f"see `{path} --help`")


def _usage_text(error: typer.TyperException) -> str:
    """The usage error in one line, with a pointer to the help."""
    text = " ".join(error.format_message().split()).rstrip(".")
    path = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
    message = f"{text[:1].lower()}{text[1:]}"
    return message if "; " in message else f"{message}; see `{path} --help`"


def print_error(line: str) -> None:
    """Print an error to standard error; the lines of a traceback in it are indented, so that none passes for another error."""
    print(f"{PROGRAM}: {visible(line).replace(chr(10), chr(10) + '  ')}", file=sys.stderr)  # noqa: T201  the one place that prints errors


def _fail(message: str, status: Status, as_json: bool, error: Exception | str) -> Status:
    print_error(message)
    if as_json:
        _write_error(message, status, error)
    return status


def _write_error(message: str, status: Status, error: BaseException | str) -> None:
    from autotune.cli.status import error_document, write_document

    write_document(error_document(visible_line(message), status, error))


def print_line(text: str) -> None:
    """Print what was done to standard error."""
    from autotune.text.console import Console

    Console(stderr=True).print(text, soft_wrap=True)


def print_note(line: str) -> None:
    """Print a note to standard error, so that standard output has only the requested output."""
    print(f"note: {line}", file=sys.stderr)  # noqa: T201


def write_export(text: str, notes: Sequence[str], out: Path | None = None) -> None:
    """Write a file's text to standard output or `out`, and its notes to standard error."""
    if out is None:
        sys.stdout.write(text)
    else:
        write_whole(out, text)
    for note in notes:
        print_line(f"note: {note}")


SCHEMAS = Path(__file__).parents[1] / "schemas" / "commands"


def schema_path(command: str) -> Path:
    """The schema of a command's document, or of `error`."""
    return SCHEMAS / f"{command.replace(' ', '-')}.schema.json"


def write_document(document: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Print the document, with null for numbers that JSON cannot represent. It is made whole before anything is printed."""
    sys.stdout.write(json.dumps(finite(document), indent=2, allow_nan=False, default=default) + "\n")


def error_document(message: str, exit_status: int, error: BaseException | str) -> dict[str, Any]:
    """The document of a command that failed. `error`: one of ours; or the kind, where nothing was raised."""
    parts = {name: getattr(error, name, None) for name in ("field", "problem", "remedy")}
    kind = error if isinstance(error, str) else type(error).__name__
    return {"error": {"kind": kind, "message": message, **parts, "exit_status": exit_status}}
