"""Reads a table of measurements: rows, and what is wrong with it line by line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import MeasurementsError
from autotune.evaluation.validation.columns import COLUMNS, TIME_COLUMNS, CellError, lost_without
from autotune.evaluation.validation.contradictions import batch_contradiction, device_contradiction, filled_in, outcome_of
from autotune.evaluation.validation.csv_file import CsvFile, Record, open_csv
from autotune.evaluation.validation.row import Row

_SHOWN = 40
"""Characters of a cell that a message quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that is not scored."""

    row_id: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with a row that is scored all the same, or with the table."""

    line: int
    """1, the header's, where it is the table's."""
    row_id: str
    """Empty where it is the table's."""
    problem: str
    """What is wrong, and what is done about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as it was read."""

    path: Path
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...]
    problems: tuple[Problem, ...]


def read_table(path: Path) -> Table:
    """Read every row that can be read.

    - A cell that does not hold what its column holds costs the row where it is part of the configuration, else itself.
    - A row that contradicts itself on the device count is skipped. One that does on the batch keeps its memory and outcome.
    - A row that repeats another cell by cell, its `row_id` too, is a copy and is skipped.

    Raises:
        MeasurementsError: the file cannot be read, is no CSV text, or lacks a column that nothing can do without.
    """
    with open_csv(path, "a CSV file of measurements") as file:
        reading = _Reading()
        reading.header(path, file)
        for record in file.records:
            reading.take(record)
    return Table(path=path, rows=tuple(reading.rows), skipped=tuple(reading.skipped), problems=tuple(reading.problems))


@dataclass(slots=True)
class _Reading:
    rows: list[Row] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    seen: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """For each row_id of the table, the lines that have it, each with a hash of its cells."""

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
            self.problems.append(Problem(line=1, row_id="", problem=f"no column {name}: {lost}"))
        for name in file.doubled:
            self.problems.append(Problem(line=1, row_id="", problem=f"more than one column {name}: the first is read"))

    def take(self, record: Record) -> None:
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

    def _read(self, record: Record, row_id: str) -> tuple[dict[str, Any], list[str]]:
        """What the cells say, and what is wrong with those of the configuration."""
        values, wrong = {}, []
        for name, column in COLUMNS.items():
            if (cell := record.cells.get(name)) is None:
                continue
            try:
                values[name] = column.read(cell)
            except CellError as error:
                told = f"{name} {_short(cell)} {error}"
                if column.configures:
                    wrong.append(told)
                else:
                    self._tell(record, row_id, f"{told}: the cell is left out")
        return values, wrong

    def _row(self, record: Record, row_id: str, values: dict[str, Any]) -> Row:
        values.update(filled_in(values))
        batch_problem = batch_contradiction(values)
        if batch_problem:
            self._tell(record, row_id, f"{batch_problem}: left out of times and ranks")
        measured = any(name in values for name in (*TIME_COLUMNS, "peak_mem_gb"))
        values["outcome"], problem = outcome_of(values, measured)
        if problem:
            self._tell(record, row_id, problem)
        return Row(line=record.line, row_id=row_id, batch_problem=batch_problem, **values)

    def _is_copy(self, record: Record) -> bool:
        if (named := record.cells.get("row_id")) is None:
            return False
        before, cells = self.seen.setdefault(named, []), hash(frozenset(record.cells.items()))
        copy = any(cells == other for _, other in before)
        if before and not copy:
            self._tell(record, named, f"line {before[0][0]} has this row_id too: both are scored, by their lines")
        before.append((record.line, cells))
        return copy

    def _skip(self, record: Record, row_id: str, reason: str) -> None:
        self.skipped.append(Skipped(row_id=row_id, line=record.line, reason=reason))

    def _tell(self, record: Record, row_id: str, problem: str) -> None:
        self.problems.append(Problem(line=record.line, row_id=row_id, problem=problem))


def _short(cell: str) -> str:
    return repr(cell if len(cell) <= _SHOWN else f"{cell[:_SHOWN]}…")
