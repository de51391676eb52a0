"""The reference grid's file: a header of comments, then a line for each measurement, in measurement order."""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from search_spaces.knob_values import parse_value
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig

DATA = Path(__file__).parents[1] / "data"
MEASURED = ("outcome", "rate", "low", "high", "within", "peak", "steps", "unstable", "seconds")


class Role(StrEnum):
    """Why a line was measured. The values are stored: never rename one."""

    POINT = "point"
    """The configuration's own measurement."""
    REFERENCE = "reference"
    """The reference, for drift."""
    REPEAT = "repeat"
    """A point measured again, for the spread between repeats."""
    TOP = "top"
    """One of the best ten, measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement."""

    order: int
    role: Role
    config: TrialConfig
    outcome: Outcome
    rate: float = 0.0
    """Samples/s; 0: not measured."""
    low: float = 0.0
    """Lower end of the 95 % interval from this measurement's own steps."""
    high: float = 0.0
    within: float = 0.0
    """Standard error of the rate within the trial, as a share of it."""
    peak: int = 0
    """Bytes of the highest rank, by the allocator's events; 0: not measured."""
    steps: int = 0
    """Timed steps."""
    unstable: bool = False
    seconds: float = 0.0
    """Wall time of the whole trial."""

    @classmethod
    def of(cls, order: int, role: Role, config: TrialConfig, result: TrialResult, seconds: float) -> "Row":
        """The row of a trial's result."""
        rate = result.samples_per_second if result.outcome is Outcome.OK else None
        return cls(
            order=order, role=role, config=config, outcome=result.outcome, rate=rate.mean if rate else 0.0,
            low=rate.low if rate else 0.0, high=rate.high if rate else 0.0, within=result.within_relative_error,
            peak=result.peak_memory_bytes or 0, steps=len(result.step_seconds), unstable=result.unstable, seconds=seconds,
        )  # fmt: skip


def grid_path(ranks: int, folder: Path = DATA) -> Path:
    """Path of the file for `ranks` ranks."""
    return folder / f"reference-grid-{ranks}.csv"


class GridFile:
    """Appends each line at once, so that no measurement is lost; continues an existing file.

    Raises:
        ValueError: the file has another header.
    """

    def __init__(self, path: Path, header: Mapping[str, str], knobs: Sequence[str]) -> None:
        self.path, self.knobs = path, tuple(knobs)
        self.rows: list[Row] = []
        if path.exists():
            found = read_header(path)
            if found != dict(header):
                changed = ", ".join(name for name in header if header[name] != found.get(name)) or "an extra line"
                raise ValueError(f"{path} was measured under another header ({changed}); move it away to start over")
            self.rows = read_rows(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [f"# {name}: {value}\n" for name, value in header.items()]
            path.write_text("".join(lines) + ",".join(("order", "role", *self.knobs, *MEASURED)) + "\n", encoding="utf-8")

    def add(self, row: Row) -> None:
        """Append a line; it is on disk when this returns."""
        self.rows.append(row)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(_cells(row, self.knobs))
            file.flush()
            os.fsync(file.fileno())


def read_header(path: Path) -> dict[str, str]:
    """The header: name -> value."""
    lines = (line[2:] for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    return dict(tuple(line.split(": ", 1)) for line in lines)  # type: ignore[misc]


def read_rows(path: Path) -> list[Row]:
    """Every measurement. A last line truncated by a crash is removed from the file."""
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text, encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return [_row(record) for record in csv.DictReader(lines)]


def _cells(row: Row, knobs: Sequence[str]) -> list[object]:
    known = {name: _plain(getattr(row.config, name)) for name in knobs}
    figures = (
        row.outcome.value, f"{row.rate:.6g}", f"{row.low:.6g}", f"{row.high:.6g}", f"{row.within:.4g}", row.peak, row.steps,
        _plain(row.unstable), f"{row.seconds:.2f}",
    )  # fmt: skip
    return [row.order, row.role.value, *known.values(), *figures]


def _row(record: Mapping[str, str]) -> Row:
    knobs = {name: parse_value(name, text) for name, text in record.items() if name not in ("order", "role", *MEASURED)}
    if "reduce_bucket_size" in knobs:
        # A whole-model bucket is stored as the default, which was larger when the first grids were measured.
        knobs["reduce_bucket_size"] = min(int(knobs["reduce_bucket_size"]), TrialConfig().reduce_bucket_size)
    return Row(
        order=int(record["order"]), role=Role(record["role"]), config=TrialConfig().replace(knobs),
        outcome=Outcome(record["outcome"]), rate=float(record["rate"]), low=float(record["low"]), high=float(record["high"]),
        within=float(record["within"]), peak=int(record["peak"]), steps=int(record["steps"]),
        unstable=record["unstable"] == "true", seconds=float(record["seconds"]),
    )  # fmt: skip


def _plain(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
