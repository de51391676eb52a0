"""Reads a table of measurements: rows, and problems by line. A CSV file is read as written in practice: any line ends, a
byte-order mark, blank lines, lines too long or too short.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from autotune.errors import MeasurementsError
from autotune.knowledge.row import ARGUMENTS, COLUMNS, TIME_COLUMNS, CellError, RowOutcome, TableRow, noted_accumulation
from autotune.knowledge.row_cases import noted_precision, noted_recompute
from autotune.knowledge.row_names import network_understood


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvRecord:
    """The cells of one line, or why it cannot be read."""

    line: int
    """Its first line; the header is line 1."""
    cells: dict[str, str]
    """Stripped text by column; blank cells and cells without a column name are omitted."""
    problem: str = ""
    """Why the line cannot be read; empty: it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile:
    """The header and a one-pass iterator of the records."""

    header: tuple[str, ...]
    doubled: tuple[str, ...]
    """Names of several columns; the first column is read."""
    records: Iterator[CsvRecord]


@contextmanager
def open_csv(path: Path, content: str) -> Iterator[CsvFile]:
    """Open a CSV file and read its header; errors name the expected `content`.

    Raises:
        MeasurementsError: it cannot be read, is not text, or is empty.
    """
    _require_text(path, content)
    # Invalid UTF-8 only affects text, never numbers: such characters are replaced.
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        csv.field_size_limit(max(csv.field_size_limit(), 1 << 20))
        header, line = _header(file)
        if not header:
            raise MeasurementsError(str(path), "is empty", f"give {content} with a header line")
        names = [name for name in header if name]
        doubled = tuple(dict.fromkeys(name for name in names if names.count(name) > 1))
        yield CsvFile(header=tuple(dict.fromkeys(names)), doubled=doubled, records=_records(file, header, line + 1))


def _require_text(path: Path, content: str) -> None:
    remedy = f"give the path of {content}"
    try:
        with path.open("rb") as file:
            start = file.read(1 << 16)
    except FileNotFoundError:
        raise MeasurementsError(str(path), "no such file", remedy) from None
    except OSError as error:
        raise MeasurementsError(str(path), f"cannot be read: {error.strerror or error}", remedy) from None
    if b"\0" in start:
        raise MeasurementsError(str(path), "is not UTF-8 text", remedy)


def _header(file: TextIO) -> tuple[list[str], int]:
    for number, line in enumerate(file, 1):
        if line.strip(", \t\r\n;"):
            # A header has no line breaks in its cells, so its line is parsed separately.
            return [cell.strip() for cell in next(csv.reader([line]), [])], number
    return [], 0


def _records(file: TextIO, header: list[str], first: int) -> Iterator[CsvRecord]:
    reader, offset = csv.reader(file), first
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield CsvRecord(line=first, cells={}, problem=f"is not a line of a CSV file: {error}")
            first = reader.line_num + offset
            continue
        line, first = first, reader.line_num + offset
        cells = [cell.strip() for cell in row]
        if any(cells):
            yield _record(line, cells, header)


def _record(line: int, cells: list[str], header: list[str]) -> CsvRecord:
    if len(cells) < len(header) or any(cells[len(header) :]):
        return CsvRecord(line=line, cells={}, problem=f"has {len(cells)} cells where the header has {len(header)}")
    cells_by_name: dict[str, str] = {}
    for name, cell in zip(header, cells, strict=False):
        if name and name not in cells_by_name:
            cells_by_name[name] = cell
    return CsvRecord(line=line, cells={name: cell for name, cell in cells_by_name.items() if cell})


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
    missing_columns: frozenset[str]


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
        path=path, rows=tuple(reading.rows), skipped=tuple(reading.skipped), problems=tuple(reading.problems),
        missing_columns=reading.missing_columns,
    )  # fmt: skip


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
    missing_columns: frozenset[str] = frozenset()
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
        self.missing_columns = missing
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
        named = any(word in str(values.get("notes", "")).lower() for word in ("kernel=", "flash", "sdpa"))
        if "megatron-lm" in str(values.get("framework", "")).lower() and not (named or "transformer_impl" in record.cells):
            assumed = "that of Megatron-LM in the device's years is assumed; say kernel=NAME in notes"
            self._report(record, row_id, f"states no attention kernel: {assumed}")
        values["outcome"], problem = outcome_of(values, measured)
        if problem:
            self._report(record, row_id, problem)
        states = ARGUMENTS if "transformer_impl" in record.cells else ()
        flags = {"True": "true", "False": "false", "TRUE": "true", "FALSE": "false"}
        arguments = {name: flags.get(cell, cell) for name, cell in record.cells.items() if name in states}
        return TableRow(line=record.line, row_id=row_id, batch_problem=batch_problem, arguments=arguments, **values)

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
