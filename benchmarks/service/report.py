"""Claims with target, measurement and verdict: printed at once, and written as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the table."""

    name: str
    target: str
    measured: str
    holds: bool


@dataclass(slots=True)
class Report:
    """Claims and notes of a page."""

    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def claim(self, claim: Claim) -> None:
        print(f"{'holds ' if claim.holds else 'MISSED'} {claim.name}: {claim.measured} (target: {claim.target})", flush=True)
        self.claims.append(claim)

    def note(self, text: str) -> None:
        print(f"       {text}", flush=True)
        self.notes.append(text)

    @property
    def good(self) -> bool:
        return all(claim.holds for claim in self.claims)

    def markdown(self, title: str, method: Sequence[str]) -> str:
        rows = [f"| {c.name} | {c.target} | {c.measured} | {'yes' if c.holds else '**no**'} |" for c in self.claims]
        table = ["| | target | measured | holds |", "|---|---|---|---|", *rows]
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"# {title}", "", *method, "", *table, "", "Further figures:", "", *notes, ""])


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{1 if seconds >= 0.01 else 2}f} ms"
