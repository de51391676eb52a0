"""Errors of the executor.

ExecutorError
├── EngineRefusalError    (ValueError)    the engine refuses a combination, with the rule's name
├── MemoryLimitError      (MemoryError)   a rank's peak is beyond its stated limit
├── WrongResultError      (ArithmeticError) loss or gradient norm not finite or off the reference
├── FactoryError          (ValueError)    a user's factory does not keep the Protocol, or raises
├── DataError             (ValueError)    the text to train on cannot be read
├── RankLostError         (ConnectionError) a rank process is gone
└── RunnerError           (RuntimeError)  a runner cannot start or place its ranks
"""


class ExecutorError(Exception):
    """Base of all errors of this package; each message is one line that names the remedy."""


class EngineRefusalError(ExecutorError, ValueError):
    """The engine refuses this combination of knobs."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(rule, message)
        self.rule = rule
        self.message = message

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


class MemoryLimitError(ExecutorError, MemoryError):
    """A rank's peak is beyond its stated limit: the trial is INFEASIBLE."""


class WrongResultError(ExecutorError, ArithmeticError):
    """A loss or a gradient norm is not finite, or the first steps are off the job's reference."""


class FactoryError(ExecutorError, ValueError):
    """A user's factory raises, or does not return what the Protocol says."""


class DataError(ExecutorError, ValueError):
    """The text to train on cannot be read or is too short."""


class RankLostError(ExecutorError, ConnectionError):
    """A rank process is gone."""


class RunnerError(ExecutorError, RuntimeError):
    """A runner cannot start or place its ranks."""
