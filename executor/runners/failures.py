"""What an exception in a rank means for its trial."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.errors import EngineRefusalError, ExecutorError, FactoryError, WrongResultError
from executor.failures import failure_table
from search_spaces.failure import Evidence, FailureTable, Sign
from search_spaces.outcome import Outcome

_OUR_FOLDERS = tuple(str(Path(__file__).resolve().parents[2] / name) + "/" for name in ("executor", "search_spaces"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception, classified."""

    outcome: Outcome
    message: str
    """One line."""
    rule: str | None = None
    traceback: str | None = None
    collective: bool = False
    """Whether this looks like the consequence of another rank's end: then that rank's failure is the one to tell."""
    cause: str | None = None
    """Name of the row of the failure table; None: a rule or the measurement itself decided."""
    retire: bool = False
    """Whether the rank processes may not be able to go on."""


def classify(
    error: BaseException, table: FailureTable | None = None, signs_of: Callable[[str], Sequence[Sign]] | None = None
) -> Failure:
    """Tell what `error` means by the failure table; of an error that has causes, what any of them means.

    A refusal and a wrong result are no failures of anything, and are in no row. What our own errors say is in their message:
    only what they wrap has a traceback. `signs_of`: what else is known of an error that says this.
    """
    if isinstance(error, EngineRefusalError):
        return Failure(outcome=Outcome.INVALID, message=error.message, rule=error.rule)
    if isinstance(error, WrongResultError):
        return Failure(outcome=Outcome.WRONG, message=one_line(error))
    causes = list(_causes(error))
    pieces = [_evidence(cause, tuple(signs_of(str(cause))) if signs_of else ()) for cause in causes]
    row, piece = (table or failure_table()).find(*pieces)
    # An INFEASIBLE trial is told by the allocator's words, wherever they were raised; anything else by what came out.
    told = causes[pieces.index(piece)] if row.outcome is Outcome.INFEASIBLE else error
    said_by_us = isinstance(error, ExecutorError) and error.__cause__ is None
    return Failure(
        outcome=row.outcome,
        message=one_line(told),
        traceback=None if said_by_us or row.outcome is Outcome.INFEASIBLE else real_traceback(error),
        collective=row.consequence,
        cause=row.name,
        retire=row.retire,
    )


def one_line(error: BaseException) -> str:
    """The error in one line; ours say all in their message, others are told with their type."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, ExecutorError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def real_traceback(error: BaseException) -> str:
    """The traceback that a user wants to see: from where it leaves our frames on, of the user's error where ours wraps it."""
    if isinstance(error, FactoryError) and error.__cause__ is not None:
        error = error.__cause__
    shown = traceback.TracebackException.from_exception(error)
    theirs = next((at for at, frame in enumerate(shown.stack) if not _is_ours(frame.filename)), 0)
    if theirs == 0 and isinstance(error, SyntaxError):
        return "".join(shown.format_exception_only())  # it has no frame of theirs, and tells the place itself
    shown.stack = traceback.StackSummary.from_list(list(shown.stack)[theirs:])
    return "".join(shown.format())


def _is_ours(filename: str) -> bool:
    return filename.startswith((*_OUR_FOLDERS, "<frozen importlib")) or "/importlib/" in filename


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _evidence(error: BaseException, signs: tuple[Sign, ...]) -> Evidence:
    return Evidence(
        exceptions=tuple(kind.__name__ for kind in type(error).__mro__),
        signs=signs,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_tb(error.__traceback__)),
    )
