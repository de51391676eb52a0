"""What an exporter returns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A configuration in another framework's format."""

    text: str
    """The file's content."""
    notes: tuple[str, ...] = ()
    """What the format cannot say, or its framework does not do, one line each."""
