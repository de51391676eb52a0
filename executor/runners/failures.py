"""What an exception in a rank means for its trial."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from executor.errors import EngineRefusalError, ExecutorError, FactoryError, WrongResultError
from search_spaces.outcome import Outcome

_OUT_OF_MEMORY = (
    "can't allocate memory",
    "DefaultCPUAllocator",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_BROKEN_COLLECTIVE = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")
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


def classify(error: BaseException) -> Failure:
    """Tell what `error` means. What our own errors say is in their message: only what they wrap has a traceback."""
    if isinstance(error, EngineRefusalError):
        return Failure(outcome=Outcome.INVALID, message=error.message, rule=error.rule)
    if isinstance(error, WrongResultError):
        return Failure(outcome=Outcome.WRONG, message=one_line(error))
    for cause in _causes(error):
        if _is_out_of_memory(cause):
            return Failure(outcome=Outcome.INFEASIBLE, message=one_line(cause))
    said_by_us = isinstance(error, ExecutorError) and error.__cause__ is None
    return Failure(
        outcome=Outcome.FAILED,
        message=one_line(error),
        traceback=None if said_by_us else real_traceback(error),
        collective=_is_broken_collective(error),
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


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _OUT_OF_MEMORY)


def _is_broken_collective(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(mark in str(error) for mark in _BROKEN_COLLECTIVE)
