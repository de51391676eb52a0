"""Errors of this package: invalid models, clusters, knobs and configurations; why a configuration is illegal,
and settings that do not have the effect that they state.

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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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
    """A rule refuses the configuration; `field` is the rule's name, `fields` those of the request that it reads (pins.NAME)."""

    def __init__(self, field: str, problem: str, remedy: str, fields: Iterable[str] = ()) -> None:
        super().__init__(field, problem, remedy)
        self.fields = tuple(fields)


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


class Effect(StrEnum):
    """What happens with the setting. The values are exported: never rename one."""

    REFUSED = "refused"
    """The framework fails when it reads the configuration."""
    FAILS = "fails"
    """The framework accepts the configuration, and fails when it builds its engine or trains."""
    IGNORED = "ignored"
    """The framework accepts the setting and never reads it."""
    CHANGED = "changed"
    """The framework does something different from what the setting says."""
    DOES_NOT_FIT = "does not fit"
    """The framework accepts the configuration, and a device runs out of memory."""
    MAY_NOT_FIT = "may not fit"
    """A device is predicted to run out of memory, with values that the configuration does not state. Not an error."""
    SLOW = "slow"
    """The configuration runs, and is predicted to lose time that a small change saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One setting that does not have the effect that it states."""

    rule: str
    key: str
    """The setting, as the framework spells it; of a file, its path with dots."""
    effect: Effect
    problem: str
    """One clause without the remedy."""
    remedy: str
    fix: Mapping[str, Any] = field(default_factory=dict)
    """The smallest change that removes the finding: setting -> its new value, None: leave it out. Empty: `remedy` says it."""

    def __str__(self) -> str:
        return f"{self.key}: {self.effect}: {self.problem}; {self.remedy}"
