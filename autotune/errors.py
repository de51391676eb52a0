"""Errors of the search.

AutotuneError
├── RequestError          (ValueError)   a field of a request is missing, unknown or outside its range
├── UnstatedError         (RequestError) fields without a default are not stated
├── DoesNotFitError       (RequestError) the model's states exceed the host's memory in every configuration
├── NothingFeasibleError  (ValueError)   no configuration of the space fits the stated limit
├── JobNotResumableError  (RuntimeError) the job has ended, or was made by another version
├── JobCutShortError      (RuntimeError) the database or the output failed while the job ran; what was measured is kept
├── NoBestError           (LookupError)  the job has no configuration that can win yet
├── BestConfigError       (ValueError)   a best-config file cannot be read
├── OutputError           (OSError)      the output path cannot be written
├── MeasurementsError     (ValueError)   a table of measurements, or of labels, cannot be read
├── KnowledgeError       (ValueError)   measurements to learn from cannot be read, or are damaged
├── MissingPackageError   (ImportError)  an optional package is not installed
├── ExportRefusedError    (ValueError)   a format cannot express a degree of the layout
└── UnknownFormatError    (LookupError)  no exporter has that name

DecisionAbandonedError    (Exception)    a decision is no longer needed; never leaves the loop
"""

from collections.abc import Mapping


class AutotuneError(Exception):
    """Base of all errors of this package. The message is one line: field, problem, remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(field, problem, remedy)
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"


class RequestError(AutotuneError, ValueError):
    """A field of a request is missing, unknown or outside its range."""


class UnstatedError(RequestError):
    """Fields without a default are not stated.

    Args:
        meanings: field -> what to give, in words.
    """

    def __init__(self, meanings: Mapping[str, str]) -> None:
        options = (f"--{name.replace('_', '-')} ({meaning})" for name, meaning in meanings.items())
        super().__init__(
            ", ".join(meanings), "not stated, and without a default for a job on GPUs", f"give {' and '.join(options)}"
        )
        self.args = (meanings,)
        self.meanings = meanings


class DoesNotFitError(RequestError):
    """The states of the model exceed the host's memory in every configuration: no process is started."""


class NothingFeasibleError(AutotuneError, ValueError):
    """The states of the model exceed the stated limit in every configuration: no process is started."""


class JobNotResumableError(AutotuneError, RuntimeError):
    """The job has ended, or its request was made by a version that this one cannot read."""


class JobCutShortError(AutotuneError, RuntimeError):
    """The database or the output failed while the job ran; what was measured is kept."""


class NoBestError(AutotuneError, LookupError):
    """The job has no configuration that can win (yet)."""


class BestConfigError(AutotuneError, ValueError):
    """A best-config file cannot be read, or has an unknown schema version."""


class OutputError(AutotuneError, OSError):
    """The output path cannot be written."""


class MeasurementsError(AutotuneError, ValueError):
    """A table of measurements, or of labels, is not a CSV file or lacks a required column."""


class KnowledgeError(AutotuneError, ValueError):
    """Measurements to learn from cannot be read, or are damaged."""


class MissingPackageError(AutotuneError, ImportError):
    """An optional package is not installed."""


class ExportRefusedError(AutotuneError, ValueError):
    """A format cannot express a degree of the layout, so the exported job would run another configuration."""


class UnknownFormatError(AutotuneError, LookupError):
    """No exporter has that name."""


class DecisionAbandonedError(Exception):
    """The run is stopping, so the computation of the next trials is abandoned."""
