"""Reads a table of measurements: rows, and problems by line."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import MeasurementsError
from autotune.knowledge.columns import COLUMNS, TIME_COLUMNS, CellError, lost_without
from autotune.knowledge.csv_file import CsvFile, CsvRecord, open_csv
from autotune.knowledge.row import RowOutcome, TableRow, noted_accumulation
from autotune.knowledge.row_cases import noted_precision, noted_recompute
from autotune.knowledge.row_names import network_understood

_SHOWN = 40
"""Maximum number of characters of a cell quoted in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that is not scored."""

    row_id: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """A problem of a row that is still scored, or of the table."""

    line: int
    """1, the header's, for a problem of the table."""
    row_id: str
    """Empty for a problem of the table."""
    problem: str
    """The problem and how it is handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementTable:
    """A table as read."""

    path: Path
    rows: tuple[TableRow, ...]
    skipped: tuple[Skipped, ...]
    problems: tuple[RowProblem, ...]


def read_table(path: Path) -> MeasurementTable:
    """Read every readable row.

    - An invalid cell makes the row unusable if it is part of the configuration; else only the cell is omitted.
    - A row whose sizes contradict the device count is skipped. One that contradicts the batch keeps its memory and outcome.
    - A row that equals another in every cell, including `row_id`, is a copy and is skipped.

    Raises:
        MeasurementsError: the file cannot be read, is not CSV text, or lacks an essential column.
    """
    with open_csv(path, "a CSV file of measurements") as file:
        reading = _Reading()
        reading.header(path, file)
        for record in file.records:
            reading.take(record)
    return MeasurementTable(
        path=path, rows=tuple(reading.rows), skipped=tuple(reading.skipped), problems=tuple(reading.problems)
    )


def read_records(records: Iterable[CsvRecord]) -> tuple[tuple[TableRow, ...], tuple[str, ...]]:
    """The rows of records in the columns of a table, and every problem of a record."""
    reading = _Reading()
    for record in records:
        reading.take(record)
    problems = [*(entry.reason for entry in reading.skipped), *(entry.problem for entry in reading.problems)]
    return tuple(reading.rows), tuple(problems)


@dataclass(slots=True)
class _Reading:
    rows: list[TableRow] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    lines_by_row_id: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """row_id -> the lines with it, each with a hash of its cells."""

    def header(self, path: Path, file: CsvFile) -> None:
        missing = frozenset(COLUMNS).difference(file.header)
        if essential := [name for name, column in COLUMNS.items() if column.essential and name in missing]:
            has = ", ".join(file.header[:5])[: 2 * _SHOWN]
            raise MeasurementsError(
                f"{path}: {', '.join(essential)}",
                f"no such column among its {len(file.header)} ({has}, …)",
                "give a comma-separated table with the columns of a table of measurements",
            )
        for name, lost in lost_without(missing).items():
            self.problems.append(RowProblem(line=1, row_id="", problem=f"no column {name}: {lost}"))
        for name in file.doubled:
            self.problems.append(RowProblem(line=1, row_id="", problem=f"more than one column {name}: the first is read"))

    def take(self, record: CsvRecord) -> None:
        row_id = record.cells.get("row_id") or f"line {record.line}"
        if record.problem or self._is_copy(record):
            self._skip(record, row_id, record.problem or "is a copy of an earlier line, its row_id too")
            return
        values, wrong = self._read(record, row_id)
        values.pop("row_id", None)
        reason = "; ".join(wrong) or device_contradiction(values)
        if reason:
            self._skip(record, row_id, reason)
            return
        self.rows.append(self._row(record, row_id, values))

    def _read(self, record: CsvRecord, row_id: str) -> tuple[dict[str, Any], list[str]]:
        """Parse the cells; also return errors in those of the configuration."""
        values, wrong = {}, []
        for name, column in COLUMNS.items():
            if (cell := record.cells.get(name)) is None:
                continue
            try:
                values[name] = column.read(cell)
            except CellError as error:
                problem = f"{name} {_short(cell)} {error}"
                if column.configures:
                    wrong.append(problem)
                else:
                    self._report(record, row_id, f"{problem}: the cell is left out")
        return values, wrong

    def _row(self, record: CsvRecord, row_id: str, values: dict[str, Any]) -> TableRow:
        values.update(filled_in(values))
        batch_problem = batch_contradiction(values)
        if batch_problem:
            self._report(record, row_id, f"{batch_problem}: left out of times and ranks")
        measured = any(name in values for name in (*TIME_COLUMNS, "peak_mem_gb"))
        if not network_understood(values.get("inter_bw")):
            assumed = "the device's usual network is assumed; say 8x 400 Gb/s per node, or 400 Gb/s per GPU"
            self._report(record, row_id, f"inter_bw {_short(values['inter_bw'])} states no rate that is understood: {assumed}")
        values["outcome"], problem = outcome_of(values, measured)
        if problem:
            self._report(record, row_id, problem)
        return TableRow(line=record.line, row_id=row_id, batch_problem=batch_problem, **values)

    def _is_copy(self, record: CsvRecord) -> bool:
        if (row_id := record.cells.get("row_id")) is None:
            return False
        before, cells = self.lines_by_row_id.setdefault(row_id, []), hash(frozenset(record.cells.items()))
        copy = any(cells == other for _, other in before)
        if before and not copy:
            self._report(record, row_id, f"line {before[0][0]} has this row_id too: both are scored, by their lines")
        before.append((record.line, cells))
        return copy

    def _skip(self, record: CsvRecord, row_id: str, reason: str) -> None:
        self.skipped.append(Skipped(row_id=row_id, line=record.line, reason=reason))

    def _report(self, record: CsvRecord, row_id: str, problem: str) -> None:
        self.problems.append(RowProblem(line=record.line, row_id=row_id, problem=problem))


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= _SHOWN else f"{cell[:_SHOWN]}…")


def device_contradiction(values: Mapping[str, Any]) -> str | None:
    """Why tp x pp x dp x cp is not the device count; a missing cp is 1, a missing dp is whatever remains."""
    devices, tp, pp, dp = (values.get(name) for name in ("num_gpus", "tp", "pp", "dp"))
    cp = values.get("cp", 1)
    if not (devices and tp and pp):
        return None
    sizes = f"tp {tp} x pp {pp} x dp {dp or '?'} x cp {cp}"
    if dp and tp * pp * dp * cp != devices:
        return f"{sizes} is {tp * pp * dp * cp}, not the {devices} devices of num_gpus"
    if not dp and devices % (tp * pp * cp):
        return f"{sizes} is the {devices} devices of num_gpus for no dp"
    return None


def filled_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Missing values that others determine: the data-parallel size by the other sizes, recomputation and precision by notes."""
    notes = values.get("notes", "")
    noted = {"recompute": noted_recompute(notes), "precision": noted_precision(notes)}
    additions: dict[str, Any] = {name: value for name, value in noted.items() if value and not values.get(name)}
    devices, tp, pp = (values.get(name) for name in ("num_gpus", "tp", "pp"))
    if not values.get("dp") and devices and tp and pp:
        additions["dp"] = devices // (tp * pp * values.get("cp", 1))
    return additions


def batch_contradiction(values: Mapping[str, Any]) -> str | None:
    """Why micro-batch x accumulation x dp is not the batch."""
    batch, micro_batch, dp = (values.get(name) for name in ("global_batch", "micro_batch", "dp"))
    if not (batch and micro_batch and dp):
        return None
    sizes, noted = f"micro_batch {micro_batch} x dp {dp}", noted_accumulation(values.get("notes", ""))
    if noted and micro_batch * dp * noted != batch:
        return f"{sizes} x accumulation {noted} is {micro_batch * dp * noted}, not global_batch {batch}"
    if batch % (micro_batch * dp):
        return f"{sizes} does not divide global_batch {batch}"
    return None


def outcome_of(values: Mapping[str, Any], measured: bool) -> tuple[RowOutcome, str | None]:
    """How the run ended, and the error in the row's statement of it, if any: then the outcome is unknown."""
    outcome_text, oom = values.get("outcome"), values.get("oom")
    if outcome_text is None:
        return (RowOutcome.OOM if oom else RowOutcome.OK if oom is False or measured else RowOutcome.UNKNOWN), None
    if outcome_text.lower() not in set(map(str, RowOutcome)):
        return RowOutcome.UNKNOWN, f"outcome {outcome_text!r} is none of {', '.join(RowOutcome)}: the row counts as unknown"
    outcome = RowOutcome(outcome_text.lower())
    if oom is not None and outcome in (RowOutcome.OK, RowOutcome.OOM) and oom != (outcome is RowOutcome.OOM):
        return (
            RowOutcome.UNKNOWN,
            f"outcome {outcome} and oom {str(oom).lower()} contradict each other: the row counts as unknown",
        )
    return outcome, None
