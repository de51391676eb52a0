"""What a check found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    good: bool
    """Whether a sweep can go on with it as it is."""
    told: str
    remedy: str = ""
    """What to do where it is not good."""
