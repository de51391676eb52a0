"""Classifies an exception in a rank: what it means for the trial."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.errors import EngineRefusalError, ExecutorError, FactoryError, WrongResultError
from executor.failures import failure_table
from search_spaces.failure import Evidence, FailureTable, Sign
from search_spaces.outcome import Outcome

_OUR_FOLDERS = tuple(str(Path(__file__).resolve().parents[2] / name) + "/" for name in ("executor", "search_spaces"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A classified exception."""

    outcome: Outcome
    message: str
    """One line."""
    rule: str | None = None
    traceback: str | None = None
    collective: bool = False
    """Whether this looks like the consequence of another rank's failure. In that case the other failure is reported."""
    cause: str | None = None
    """Name of the row of the failure table; None: a rule or the measurement itself decided."""
    retire: bool = False
    """Whether the rank processes may be unusable for further trials."""


def classify(
    error: BaseException, table: FailureTable | None = None, signs_of: Callable[[str], Sequence[Sign]] | None = None
) -> Failure:
    """Classify `error` and its chain of causes by the failure table.

    A refusal and a wrong result are not failures, so no row describes them. Our own errors say everything in their message;
    only the errors that they wrap have a traceback. `signs_of` returns further signs for an error with this message.
    """
    if isinstance(error, EngineRefusalError):
        return Failure(outcome=Outcome.INVALID, message=error.message, rule=error.rule)
    if isinstance(error, WrongResultError):
        return Failure(outcome=Outcome.WRONG, message=one_line(error))
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    pieces = [_evidence(cause, tuple(signs_of(str(cause))) if signs_of else ()) for cause in causes]
    row, piece = (table or failure_table()).find(*pieces)
    # Report an INFEASIBLE trial with the allocator's message, wherever it was raised; any other with the outermost error.
    reported = causes[pieces.index(piece)] if row.outcome is Outcome.INFEASIBLE else error
    is_own_error = isinstance(error, ExecutorError) and error.__cause__ is None
    return Failure(
        outcome=row.outcome,
        message=one_line(reported),
        traceback=None if is_own_error or row.outcome is Outcome.INFEASIBLE else real_traceback(error),
        collective=row.consequence,
        cause=row.name,
        retire=row.retire,
    )


def one_line(error: BaseException) -> str:
    """Return the error in one line: our own by their message, others with their type."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, ExecutorError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def real_traceback(error: BaseException) -> str:
    """Return the part of the traceback behind our own frames; if our error wraps the user's, the traceback of the user's."""
    if isinstance(error, FactoryError) and error.__cause__ is not None:
        error = error.__cause__
    shown = traceback.TracebackException.from_exception(error)
    theirs = next((at for at, frame in enumerate(shown.stack) if not _is_ours(frame.filename)), 0)
    if theirs == 0 and isinstance(error, SyntaxError):
        return "".join(shown.format_exception_only())  # it has no user frame, and names the location itself
    shown.stack = traceback.StackSummary.from_list(list(shown.stack)[theirs:])
    return "".join(shown.format())


def _is_ours(filename: str) -> bool:
    return filename.startswith((*_OUR_FOLDERS, "<frozen importlib")) or "/importlib/" in filename


def _evidence(error: BaseException, signs: tuple[Sign, ...]) -> Evidence:
    return Evidence(
        exceptions=tuple(kind.__name__ for kind in type(error).__mro__),
        signs=signs,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_tb(error.__traceback__)),
    )
