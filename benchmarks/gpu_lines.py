"""Results of the proofs on a GPU as lines of JSON: one a result, on the disk before the next one begins."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

ANY = "any"
"""The device of a result that needs none."""


class State(StrEnum):
    """What a line says of its item."""

    BEGUN = "begun"
    """The item was started. No result: without one after it, the process ended inside of the item."""
    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    """An interval is too wide: it has values that satisfy the claim and values that do not."""
    MEASURED = "measured"
    """A figure of which nothing is claimed."""
    SKIPPED = "skipped"
    """This device cannot show it; the reason is in the text."""
    NOT_RUN = "not run"
    """Something is missing that can be brought; the text says what. It is tried again."""


FINAL = frozenset(State) - {State.BEGUN, State.NOT_RUN}
"""States that are not tried again."""
_WORST = (State.FAILS, State.NOT_RUN, State.UNDECIDED, State.HOLDS, State.MEASURED, State.SKIPPED)


def worst(states: Iterable[State]) -> State:
    """The state of an item with claims in these states."""
    return min(states, key=_WORST.index, default=State.MEASURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence of a result."""

    state: State
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One item's result, or its beginning."""

    part: str
    item: str
    state: State
    claims: tuple[Claim, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Figures for pages and for later items: what JSON can hold."""
    seconds: float = 0.0
    device: str = "cpu"
    """cpu, cuda, or `ANY`."""
    size: str = "small"
    """Of the models: small or large."""
    machine: str = ""
    """What it was run on, for the page."""

    @property
    def key(self) -> tuple[str, str]:
        """Under which a later line replaces an earlier one."""
        return self.part, self.item


def parse(text: str) -> Line:
    """A line of a file.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    raw = json.loads(text)
    claims = tuple(Claim(state=State(claim["state"]), text=claim["text"]) for claim in raw.pop("claims"))
    return Line(**{**raw, "state": State(raw["state"]), "claims": claims})


def read_lines(paths: Iterable[Path]) -> list[Line]:
    """Every line of the files that are there, in order. A last line that was cut off in the middle is no result.

    Raises:
        ValueError: another line cannot be read; the message names it.
    """
    found = []
    for path in paths:
        if not path.exists():
            continue
        whole, newline, _ = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
        for number, text in enumerate(whole.split("\n") if newline else [], start=1):
            try:
                found.append(parse(text))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number} is no result ({error!r}); remove the line") from None
    return found


def results(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """(part, item) -> its result; of several the last."""
    return {line.key: line for line in lines if line.state is not State.BEGUN}


class LineFile:
    """A file that lines are added to."""

    def __init__(self, path: Path) -> None:
        """A last line that was cut off is removed."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if path.exists() else b""
        if not whole.endswith(b"\n"):
            with path.open("ab") as file:
                file.truncate(whole.rfind(b"\n") + 1)

    def add(self, line: Line) -> None:
        """Write a line; it is on the disk when this returns."""
        with self.path.open("ab") as file:
            file.write((json.dumps(asdict(line)) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
