"""Errors of this package: invalid models, clusters, knobs and configurations; and why a configuration is illegal.

SearchSpaceError
├── ModelFormatError      (ValueError)   a model description cannot be read
├── ClusterFormatError    (ValueError)   a cluster description cannot be read
├── UnknownNameError      (LookupError)  no preset, knob or space has this name
├── KnobValueError        (ValueError)   a value is outside its knob's domain
├── IllegalConfigError    (ValueError)   a rule refuses the configuration
├── SpaceFormatError      (ValueError)   a space file or a pin cannot be read
├── FailureTableError     (ValueError)   a row of a failure table is invalid
├── PatternError          (ValueError)   a regular expression cannot be used
├── SpaceTooLargeError    (ValueError)   counting a space takes more steps than allowed
└── PluginError           (ImportError)  a plug-in cannot be loaded
"""

from dataclasses import dataclass


class SearchSpaceError(Exception):
    """Base of all errors of this package. The message is one line with field, problem and remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(field, problem, remedy)
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"


class ModelFormatError(SearchSpaceError, ValueError):
    """A model description lacks a key, has a value of the wrong type, or an unknown family."""


class ClusterFormatError(SearchSpaceError, ValueError):
    """A cluster description lacks a key, has a value of the wrong type, or exceeds the available devices."""


class UnknownNameError(SearchSpaceError, LookupError):
    """No preset, knob or space has the given name."""


class KnobValueError(SearchSpaceError, ValueError):
    """A value is outside its knob's domain."""


class IllegalConfigError(SearchSpaceError, ValueError):
    """A rule refuses the configuration; `field` is the rule's name."""


class SpaceFormatError(SearchSpaceError, ValueError):
    """A space file or a pin (KNOB=VALUE) cannot be read."""


class FailureTableError(SearchSpaceError, ValueError):
    """A row of a failure table is invalid, or its file cannot be read."""


class PatternError(SearchSpaceError, ValueError):
    """A regular expression cannot be read, or is too large."""


class SpaceTooLargeError(SearchSpaceError, ValueError):
    """Counting a space takes more steps than the caller allowed."""


class PluginError(SearchSpaceError, ImportError):
    """A plug-in is not installed, cannot be imported, or does not have the type that its entry-point group requires."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One rule that refuses a configuration, with a remedy."""

    rule: str
    message: str
    """The problem, in one clause."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}; {self.remedy}"
