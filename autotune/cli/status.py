"""Exit statuses, and errors as one clear line on standard error."""

import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import typer

from autotune.text.visible_text import visible_line

PROGRAM = "autotune"


class Status(IntEnum):
    """What the command's exit status means."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOTHING_FEASIBLE = 3
    INTERRUPTED = 130


def exit_status(app: typer.Typer, arguments: Sequence[str], further: dict[str, Any]) -> int:
    """Run the application; an error that is ours becomes one line and its status, an unknown one keeps its traceback.

    `further`: what commands find in their context beside the arguments.
    """
    try:
        # The name is given, since the shell's completion is looked for under it.
        result = app(args=list(arguments), prog_name=PROGRAM, standalone_mode=False, obj=further)
    except typer.TyperException as error:
        return _fail(_usage_text(error), Status.USAGE)
    except typer.Abort:
        return _fail("interrupted", Status.INTERRUPTED)
    except Exception as error:
        status = status_of(error)
        if status is None:
            raise
        return _fail(str(error), status)
    return result if isinstance(result, int) else Status.OK


def end(command: Callable[[], Status]) -> None:
    """Run what a command does, and end with its status; Ctrl-C, where the command has no answer of its own, is told."""
    try:
        status = command()
    except KeyboardInterrupt:
        raise typer.Abort from None
    raise typer.Exit(status)


def status_of(error: Exception) -> Status | None:
    """The status of an error of ours; None: it is none of ours."""
    # Here, not above: `autotune --help` must not load these packages.
    from autotune.errors import AutotuneError, NoBestError, NothingFeasibleError
    from executor.errors import DataError, ExecutorError, FactoryError
    from search_spaces.errors import SearchSpaceError
    from storage.errors import LeaseHeldError, LeaseLostError, StorageError

    match error:
        case NothingFeasibleError():
            return Status.NOTHING_FEASIBLE
        case NoBestError() | LeaseHeldError() | LeaseLostError():
            return Status.FAILURE
        case AutotuneError() | SearchSpaceError() | StorageError() | FactoryError() | DataError():
            return Status.USAGE
        case ExecutorError():
            return Status.FAILURE
        case _:
            return _status_of_client(error)


def _status_of_client(error: Exception) -> Status | None:
    """The same of an error of the client. Where none has loaded the client, it is not loaded: it needs httpx2."""
    client = sys.modules.get("autotune.client.errors")
    if client is None or not isinstance(error, client.ServiceError):
        return None
    if isinstance(error, client.UnreachableError | client.UnavailableError):
        return Status.FAILURE
    # What the service refuses is the user's to mend; where it fails itself, the class is the base.
    return Status.FAILURE if type(error) is client.ServiceError else Status.USAGE


def _usage_text(error: typer.TyperException) -> str:
    """What is wrong with the command line, on one line with where to look."""
    text = " ".join(error.format_message().split()).rstrip(".")
    path = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
    told = f"{text[:1].lower()}{text[1:]}"
    return told if "; " in told else f"{told}; see `{path} --help`"


def _fail(message: str, status: Status) -> Status:
    print(f"{PROGRAM}: {visible_line(message)}", file=sys.stderr)  # noqa: T201  the one place that prints errors
    return status


def print_note(line: str) -> None:
    """Print a note on standard error, so that standard output stays what was asked for."""
    print(f"note: {line}", file=sys.stderr)  # noqa: T201
