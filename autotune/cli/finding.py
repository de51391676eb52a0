"""The result of a check."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedItem:
    """One checked item."""

    name: str
    good: bool
    """Whether it does not prevent a sweep."""
    text: str
    """The result."""
    remedy: str = ""
    """What to do if it is not good."""

    def document(self) -> dict[str, Any]:
        """As an element of `doctor --json`, where the result's key is `told`."""
        return {"name": self.name, "good": self.good, "told": self.text, "remedy": self.remedy}
