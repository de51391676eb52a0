"""Why a configuration is illegal."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """One rule that refuses a configuration, with what to do about it."""

    rule: str
    message: str
    """One clause that says what is wrong."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}; {self.remedy}"
