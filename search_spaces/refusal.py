"""The reason why a configuration is illegal."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """One rule that refuses a configuration, with a remedy."""

    rule: str
    message: str
    """The problem, in one clause."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}; {self.remedy}"
