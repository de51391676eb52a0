"""Exit statuses, and printing errors as one line on standard error."""

import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import typer

from autotune.installed import missing_line
from autotune.text.visible_text import visible_line

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
    try:
        # The name is given because shell completion depends on it.
        result = app(args=list(arguments), prog_name=PROGRAM, standalone_mode=False, obj=further)
    except typer.TyperException as error:
        return _fail(_usage_text(error), Status.USAGE, as_json, "UsageError")
    except typer.Abort:
        return _fail("interrupted", Status.INTERRUPTED, as_json, "Interrupted")
    except ModuleNotFoundError as error:
        line = missing_line(error)
        if line is None:
            raise
        return _fail(line, Status.USAGE, as_json, error)
    except Exception as error:
        status = status_of(error)
        if status is None:
            raise
        return _fail(str(error), status, as_json, error)
    return result if isinstance(result, int) else Status.OK


def end(command: Callable[[], Status]) -> None:
    """Run a command and exit with its status. Ctrl-C aborts, unless the command handles it."""
    try:
        status = command()
    except KeyboardInterrupt:
        raise typer.Abort from None
    raise typer.Exit(status)


def status_of(error: Exception) -> Status | None:
    """The status of one of our errors; None: it is not ours."""
    # Imported here because `autotune --help` must not load these packages.
    from autotune.errors import AutotuneError, NoBestError, NothingFeasibleError
    from executor.errors import DataError, ExecutorError, FactoryError, WeightsError
    from search_spaces.errors import SearchSpaceError
    from storage.errors import LeaseHeldError, LeaseLostError, StorageError

    match error:
        case NothingFeasibleError():
            return Status.NOTHING_FEASIBLE
        case NoBestError() | LeaseHeldError() | LeaseLostError():
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


def _usage_text(error: typer.TyperException) -> str:
    """The usage error in one line, with a pointer to the help."""
    text = " ".join(error.format_message().split()).rstrip(".")
    path = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
    message = f"{text[:1].lower()}{text[1:]}"
    return message if "; " in message else f"{message}; see `{path} --help`"


def print_error(line: str) -> None:
    """Print an error to standard error."""
    print(f"{PROGRAM}: {visible_line(line)}", file=sys.stderr)  # noqa: T201  the one place that prints errors


def _fail(message: str, status: Status, as_json: bool, error: Exception | str) -> Status:
    print_error(message)
    if as_json:
        from autotune.cli.documents import error_document, write_document

        write_document(error_document(visible_line(message), status, error))
    return status


def print_note(line: str) -> None:
    """Print a note to standard error, so that standard output has only the requested output."""
    print(f"note: {line}", file=sys.stderr)  # noqa: T201
