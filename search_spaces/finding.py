"""One setting of a framework's configuration that does not have the effect that it states."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


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
