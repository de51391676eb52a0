"""A CSV file as written in practice: any line ends, a byte-order mark, blank lines, lines too long or too short."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from autotune.errors import MeasurementsError


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
