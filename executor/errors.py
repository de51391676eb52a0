"""Errors of the executor, and the table of failures with their causes (`failures.toml`).

ExecutorError
├── EngineRefusalError    (ValueError)    the engine refuses a combination, with the rule's name
├── MemoryLimitError      (MemoryError)   a rank's peak exceeds its stated limit
├── WrongResultError      (ArithmeticError) loss or gradient norm not finite or different from the reference
├── FactoryError          (ValueError)    a user's factory raises or violates the Protocol
├── DataError             (ValueError)    the training text cannot be read
├── WeightsError          (ValueError)    weights do not belong to the model
├── CheckpointError       (ValueError)    a checkpoint cannot be written, is damaged, or belongs to another model
└── RunnerError           (RuntimeError)  a runner cannot start or place its ranks
"""

import tomllib
from functools import lru_cache
from pathlib import Path

from search_spaces.failure import FailureRow, FailureTable, rows_from


class ExecutorError(Exception):
    """Base of all errors of this package. Each message is one line that names the remedy."""


def one_line(error: BaseException) -> str:
    """The error in one line: our own by their message, others with their type."""
    first = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, ExecutorError):
        return first
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class EngineRefusalError(ExecutorError, ValueError):
    """The engine refuses this combination of knobs."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(rule, message)
        self.rule = rule
        self.message = message

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


class MemoryLimitError(ExecutorError, MemoryError):
    """A rank's peak exceeds its stated limit: the trial is INFEASIBLE."""


class WrongResultError(ExecutorError, ArithmeticError):
    """A loss or a gradient norm is not finite, or the losses of the first steps differ from the job's reference."""


class WeightsError(ExecutorError, ValueError):
    """Weights do not belong to the model."""


class CheckpointError(ExecutorError, ValueError):
    """A checkpoint cannot be written, is damaged, or belongs to another model or optimizer."""


class FactoryError(ExecutorError, ValueError):
    """A user's factory raises, or does not return what the Protocol requires."""


class DataError(ExecutorError, ValueError):
    """The training text cannot be read or is too short."""


class RunnerError(ExecutorError, RuntimeError):
    """A runner cannot start or place its ranks."""


@lru_cache(16)
def failure_table(rows: tuple[FailureRow, ...] = ()) -> FailureTable:
    """Return the table of failures and their causes, extended by a user's `rows`."""
    return _SHIPPED.with_rows(rows) if rows else _SHIPPED


# Read at import time: a rank imports all of our modules when it starts, and none later.
_SHIPPED = FailureTable(
    rows_from(tomllib.loads(Path(__file__).with_name("failures.toml").read_text(encoding="utf-8")), FailureTable(()))
)
