"""The result of a check."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One checked item."""

    name: str
    good: bool
    """Whether it does not prevent a sweep."""
    told: str
    """The result as text. The name is a key of `doctor --json`."""
    remedy: str = ""
    """What to do if it is not good."""
