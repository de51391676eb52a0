"""Exit statuses, and errors as one clear line on standard error."""

import sys
from enum import IntEnum

import click
import typer


class Status(IntEnum):
    """What the command's exit status means."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOTHING_FEASIBLE = 3
    INTERRUPTED = 130


def exit_status(app: typer.Typer) -> int:
    """Run the application; an error that is ours becomes one line and its status, an unknown one keeps its traceback."""
    try:
        result = app(standalone_mode=False)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        return _fail(error.format_message(), Status.USAGE)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", Status.INTERRUPTED)
    except Exception as error:
        status = status_of(error)
        if status is None:
            raise
        return _fail(str(error), status)
    return result if isinstance(result, int) else Status.OK


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
            return None


def _fail(message: str, status: Status) -> Status:
    print(f"autotune: {message}", file=sys.stderr)  # noqa: T201  the one place that prints errors
    return status
