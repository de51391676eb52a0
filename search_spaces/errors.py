"""Errors of the vocabulary: what is wrong with a model, a cluster, a knob or a configuration.

SearchSpaceError
├── ModelFormatError      (ValueError)   a model description cannot be read
├── ClusterFormatError    (ValueError)   a cluster description cannot be read
├── UnknownNameError      (LookupError)  no preset, knob or space has that name
├── KnobValueError        (ValueError)   a knob is given a value outside its domain
├── IllegalConfigError    (ValueError)   a rule refuses the configuration
├── SpaceFormatError      (ValueError)   a space file or a pin cannot be read
├── FailureTableError     (ValueError)   a row of a failure table has no meaning
├── PatternError          (ValueError)   a regular expression cannot be used
├── SpaceTooLargeError    (ValueError)   counting a space takes more steps than were allowed
└── PluginError           (ImportError)  a plug-in cannot be loaded
"""


class SearchSpaceError(Exception):
    """Base of all errors of this package: one line that names the field, and the remedy."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(field, problem, remedy)
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"


class ModelFormatError(SearchSpaceError, ValueError):
    """A model description lacks a key, has a value of the wrong kind, or is of a family that is not known."""


class ClusterFormatError(SearchSpaceError, ValueError):
    """A cluster description lacks a key, has a value of the wrong kind, or asks for more than there is."""


class UnknownNameError(SearchSpaceError, LookupError):
    """A preset, a knob or a space is asked for by a name that does not exist."""


class KnobValueError(SearchSpaceError, ValueError):
    """A knob is given a value that its domain does not hold."""


class IllegalConfigError(SearchSpaceError, ValueError):
    """A rule refuses the configuration; `field` is the rule's name."""


class SpaceFormatError(SearchSpaceError, ValueError):
    """A space file or a pin (KNOB=VALUE) cannot be read."""


class FailureTableError(SearchSpaceError, ValueError):
    """A row of a failure table has no meaning, or its file cannot be read."""


class PatternError(SearchSpaceError, ValueError):
    """A regular expression cannot be read, or is too large."""


class SpaceTooLargeError(SearchSpaceError, ValueError):
    """Counting a space takes more steps than whoever asked allowed."""


class PluginError(SearchSpaceError, ImportError):
    """A plug-in is not installed, cannot be imported, or is not what its group needs."""
