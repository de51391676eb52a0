"""Results of the GPU proofs as lines of JSON: one line a result, on disk before the next item begins."""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

ANY = "any"
"""The device of a result that needs none."""


class State(StrEnum):
    """State of an item or of a claim."""

    BEGUN = "begun"
    """The item was started. If no result follows, the process ended inside the item."""
    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    """The interval contains values that satisfy the claim and values that do not."""
    MEASURED = "measured"
    """A figure without a claim."""
    SKIPPED = "skipped"
    """This device cannot show it; the reason is in the text."""
    NOT_RUN = "not run"
    """Something is missing that can be provided; the text names it. The item is tried again."""


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
    """One item's result, or its start."""

    part: str
    item: str
    state: State
    claims: tuple[Claim, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Figures for pages and later items; JSON values."""
    seconds: float = 0.0
    device: str = "cpu"
    """cpu, cuda, or `ANY`."""
    size: str = "small"
    """Size of the models: small or large."""
    machine: str = ""
    """The machine it ran on, for the page."""
    card: str = ""
    """The device's name; empty in lines that name it in `machine` only."""
    commit: str = ""
    """The commit of the code, with + if files were changed; empty: unknown."""

    @property
    def ran_on(self) -> str:
        """The name of the device."""
        return self.card or self.machine.partition(", torch")[0]

    @property
    def key(self) -> tuple[str, str]:
        """Key by which a later line replaces an earlier one."""
        return self.part, self.item


def parse(text: str) -> Line:
    """Parse a line of a file.

    Raises:
        ValueError, KeyError, TypeError: the text is not a line.
    """
    raw = json.loads(text)
    claims = tuple(Claim(state=State(claim["state"]), text=claim["text"]) for claim in raw.pop("claims"))
    return Line(**{**raw, "state": State(raw["state"]), "claims": claims})


def read_lines(paths: Iterable[Path]) -> list[Line]:
    """All lines of the existing files, in order. A truncated last line is ignored.

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
                raise ValueError(f"{path}:{number} is not a result ({error!r}); remove the line") from None
    return found


def results(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """(part, item) -> its last result."""
    return {line.key: line for line in lines if line.state is not State.BEGUN}


def commit_of(folder: Path) -> str:
    """The commit checked out in a folder, with + if tracked files differ from it; empty: it is no checkout."""
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=30)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return head.stdout.strip() + ("+" if changed.returncode else "") if head.returncode == 0 else ""


class LineFile:
    """A file to which lines are appended."""

    def __init__(self, path: Path) -> None:
        """Removes a truncated last line."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if path.exists() else b""
        if not whole.endswith(b"\n"):
            with path.open("ab") as file:
                file.truncate(whole.rfind(b"\n") + 1)

    def add(self, line: Line) -> None:
        """Append a line; it is on disk when this returns."""
        with self.path.open("ab") as file:
            file.write((json.dumps(asdict(line)) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
