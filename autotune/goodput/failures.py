"""Rates of interruptions: published presets, or a log of the user's own cluster."""

import csv
import math
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autotune.errors import RequestError

DAY = 86400.0
START, END, PAUSED, RESUMED = "start", "end", "paused", "resumed"
"""Rows of a log that delimit the time in which failures were recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKind:
    """Failures with one cause."""

    name: str
    per_node_day: float
    """Interruptions of the job caused by one node in a day."""
    takes_node: bool = True
    """Whether the node must be repaired or replaced before it is used again."""
    detection_seconds: float | None = None
    """Time until the job has stopped; None: the run's."""

    def __post_init__(self) -> None:
        for field in ("per_node_day", "detection_seconds"):
            value = getattr(self, field)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise RequestError("failures", f"{field} of {self.name} is {value}", "give 0 or a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRates:
    """Independent failures of nodes, a Poisson process for each kind."""

    name: str
    kinds: tuple[FailureKind, ...]
    planned_per_day: float = 0.0
    """Planned interruptions of the whole job in a day of running."""
    events: int = 0
    """Interruptions from which the rates were estimated, for the uncertainty of the end date; 0: rates taken as exact."""
    source: str = ""

    @property
    def per_node_day(self) -> float:
        """Unexpected interruptions per node-day, all kinds."""
        return sum(kind.per_node_day for kind in self.kinds)

    def per_second(self, nodes: int) -> float:
        """Unexpected interruptions per second of a job on `nodes` nodes."""
        return self.per_node_day * nodes / DAY

    def mean_hours_between(self, nodes: int) -> float:
        """Mean time to failure of a job on `nodes` nodes, in hours; infinite without failures."""
        rate = self.per_second(nodes)
        return 1 / rate / 3600 if rate else math.inf

    def detections(self, default: float) -> tuple[tuple[float, float], ...]:
        """(Share of the failures, seconds to detect them) for each kind; `default` for kinds without their own time."""
        total = self.per_node_day
        if not total:
            return ((1.0, default),)
        kinds = ((kind.per_node_day / total, kind.detection_seconds) for kind in self.kinds)
        return tuple((share, default if seconds is None else seconds) for share, seconds in kinds)


@cache
def _presets() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("failure_rates.toml").read_text(encoding="utf-8"))


def preset_names() -> tuple[str, ...]:
    """Names of the published rates."""
    return tuple(_presets())


def failure_rates(text: str, nodes: int) -> FailureRates:
    """The rates that `text` names: a preset, or the path of a log (`read_log`) of a cluster of `nodes` nodes.

    Raises:
        RequestError: there is no such preset or file, or the log is invalid.
    """
    preset = _presets().get(text)
    if preset is None:
        if text.endswith(".csv"):
            return read_log(Path(text), nodes)
        raise RequestError("failures", f"{text!r} is not known", f"use one of {', '.join(_presets())}, or a log NAME.csv")
    return FailureRates(
        name=text,
        kinds=tuple(FailureKind(name=name, **values) for name, values in preset["kinds"].items()),
        planned_per_day=preset["planned_per_day"],
        events=preset["events"],
        source=preset["source"],
    )


def read_log(path: Path, nodes: int) -> FailureRates:
    """Estimate rates from a log of interruptions.

    The file is CSV with the header `hours,kind`: hours since any origin, ascending. The first row has the kind `start`, the
    last one `end`. Between rows `paused` and `resumed` nothing was recorded, and the time does not count. Every other row is
    one interruption; the kind `planned` is a planned one. The rate of a kind is its count divided by nodes times recorded days.

    Args:
        path: the file.
        nodes: nodes of the job or cluster that the log is about.

    Raises:
        RequestError: the file cannot be read, hours are negative or descend, or the log has a gap.
    """
    rows = _rows(path)
    recorded, longest, opened = 0.0, (0.0, 0.0), rows[0][0]
    counts: Counter[str] = Counter()
    previous, running = rows[0][0], True
    for hours, kind in rows[1:]:
        if kind in (PAUSED, END) or running:
            longest = max(longest, (hours - previous, previous)) if running else longest
        if kind == RESUMED:
            _require(not running, path, f"the row at {hours:g} h resumes a recording that was not paused", "add a row `paused`")
            running, opened = True, hours
        elif not running:
            raise _error(path, f"the row at {hours:g} h ({kind}) is in a pause", "add a row `resumed` before it")
        elif kind in (PAUSED, END):
            running, recorded = False, recorded + hours - opened
        else:
            counts[kind] += 1
        previous = hours
    _require(recorded > 0, path, "it covers no time", "give rows `start` and `end` at different hours")
    events = sum(counts[kind] for kind in counts)
    _require_no_gap(path, events, recorded, *longest)
    node_days = nodes * recorded / 24
    # Kind of an interruption that was scheduled: the job saves a checkpoint first and loses no work.
    planned = counts.pop("planned", 0)
    without_repair = ("network", "software", "other", "hang")  # after these the node is used again
    kinds = (
        FailureKind(name=kind, per_node_day=count / node_days, takes_node=kind not in without_repair)
        for kind, count in sorted(counts.items())
    )
    return FailureRates(
        name=path.name, kinds=tuple(kinds), planned_per_day=planned / recorded * 24, events=sum(counts.values()),
        source=f"{path.name}: {events} interruptions in {recorded:g} h on {nodes} nodes",
    )  # fmt: skip


def _rows(path: Path) -> Sequence[tuple[float, str]]:
    """(Hours, kind) of each row, checked one by one."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise _error(path, f"it cannot be read ({error})", "give a CSV file") from error
    _require(bool(table) and [cell.strip() for cell in table[0]] == ["hours", "kind"], path, "its header is not hours,kind",
             "write it as the first line")  # fmt: skip
    rows: list[tuple[float, str]] = []
    for line, cells in enumerate(table[1:], 2):
        if not cells:
            continue
        try:
            hours, kind = float(cells[0]), cells[1].strip().lower()
        except (ValueError, IndexError) as error:
            raise _error(path, f"line {line} is not HOURS,KIND", "write for example 12.5,gpu") from error
        if not math.isfinite(hours) or hours < 0:
            raise _error(path, f"line {line} has {cells[0].strip()} hours", "give hours since the start, 0 or more")
        if rows and hours < rows[-1][0]:
            raise _error(path, f"line {line} is at {hours:g} h, before the line above it", "sort the rows by hours")
        rows.append((hours, kind))
    _require(bool(rows) and rows[0][1] == START, path, "its first row is not a `start`", "add when the recording started")
    _require(rows[-1][1] == END, path, "its last row is not an `end`", "add when the recording ended")
    return rows


def _require_no_gap(path: Path, events: int, recorded: float, longest: float, since: float) -> None:
    """Refuse a log whose longest time without an entry is not plausible: the recording had stopped."""
    if events < 2:
        return
    chance = (events + 1) * math.exp(-longest * events / recorded)  # of such a gap, in a Poisson process
    problem = f"it has no entry for {longest:g} h after {since:g} h, with one every {recorded / events:.3g} h on average"
    _require(chance >= 1e-6, path, problem, "add rows `paused` and `resumed` where nothing was recorded")


def _require(right: bool, path: Path, problem: str, remedy: str) -> None:
    if not right:
        raise _error(path, problem, remedy)


def _error(path: Path, problem: str, remedy: str) -> RequestError:
    return RequestError("failures", f"{path.name}: {problem}", remedy)
