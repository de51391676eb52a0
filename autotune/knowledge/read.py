"""Knowledge as users name it: a table, a log, a job of the database, or the address of a table."""

import csv
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from autotune.errors import KnowledgeError
from autotune.imports.history import RATES
from autotune.knowledge.collect import job_measurements
from autotune.knowledge.columns import COLUMNS
from autotune.knowledge.measurement import Collected, Measurement, measurements_of_rows
from autotune.knowledge.mlperf import has_log, logs_of, read_log
from autotune.knowledge.row import TableRow
from autotune.knowledge.table import read_records, read_table
from storage.address import default_database_url, without_password
from storage.store import open_store

MOST_BYTES = 1 << 28
FORMS = "give a table, an MLPerf log or a folder of them, a job of the database, or the address of a table"
_STUDIES = (".db", ".sqlite", ".sqlite3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """What a user's table, logs or job hold."""

    rows: tuple[TableRow, ...]
    """In the columns of tables."""
    notes: tuple[str, ...]
    """A line for everything that is left out."""
    trials: tuple[Measurement, ...] = ()
    """Of a job; empty: the rows have all that is known."""

    def measurements(self) -> Collected:
        """The measurements that predictions can learn from."""
        return Collected(measurements=self.trials, left_out={}) if self.trials else measurements_of_rows(self.rows)


def read_knowledge(source: str, database: str | None = None) -> Knowledge:
    """Read what the user names.

    Args:
        source: a path, an address, or a job's id.
        database: the database of the job; None: the default one.

    Raises:
        KnowledgeError: it cannot be read, or is empty.
        MeasurementsError: a table cannot be read.
        LookupError: there is no such job.
    """
    if "://" in source and not source.startswith("sqlite:"):
        return _downloaded(source)
    if Path(source).is_dir():
        return _of_logs(logs_of(Path(source)), source)
    if Path(source).is_file():
        return _of_file(Path(source), source)
    if "/" in source or source.endswith((".csv", *_STUDIES)):
        raise KnowledgeError("knowledge", f"{source} does not exist", FORMS)
    with open_store(database or default_database_url()) as store:
        collected = job_measurements(store, store.jobs.get(source).id)
    notes = collected.lines(source)
    if not collected.measurements:
        raise KnowledgeError("knowledge", f"{source} has no measurement", "; ".join(notes) or FORMS)
    rows = tuple(measurement.row for measurement in collected.measurements if measurement.row is not None)
    return Knowledge(rows=rows, notes=notes, trials=collected.measurements)


def is_history(source: str) -> bool:
    """Whether it holds trials of the job's own model, batch and hardware: an Optuna study, or a table of knobs and rates."""
    address = source.partition("#")[0]
    if source.startswith("sqlite:") or "#" in source or address.endswith(_STUDIES):
        return True
    if "://" in source or not Path(source).is_file():
        return False
    try:
        with Path(source).open(newline="", encoding="utf-8-sig", errors="replace") as file:
            header = {name.strip() for name in next(csv.reader(file), [])}
    except (OSError, csv.Error):
        return False
    essential = {name for name, column in COLUMNS.items() if column.essential}
    return not essential <= header and bool(header & {*RATES})


def _of_file(path: Path, name: str) -> Knowledge:
    if has_log(path):
        return _of_logs([path], name)
    table = read_table(path)
    skipped = len(table.skipped)
    notes = Collected(measurements=(), left_out={"it cannot be read as a row": skipped} if skipped else {}).lines(name)
    return Knowledge(rows=table.rows, notes=notes)


def _of_logs(logs: Sequence[Path], name: str) -> Knowledge:
    if not logs:
        raise KnowledgeError("knowledge", f"{name} has no MLPerf log", FORMS)
    records, left_out = [], list[KnowledgeError]()
    for path in logs:
        try:
            records.append(read_log(path))
        except KnowledgeError as error:
            left_out.append(error)
    if not records:
        raise left_out[0]
    rows, problems = read_records(records)
    notes = (*(f"left out: {error}" for error in left_out), *(f"{name}: {problem}" for problem in problems))
    return Knowledge(rows=rows, notes=notes)


def _downloaded(address: str) -> Knowledge:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "knowledge"
        file.write_bytes(_download(address))
        return _of_file(file, address)


def _download(address: str) -> bytes:
    shown, remedy = without_password(address), "check the address, or download the file and give its path"
    if not address.startswith(("http://", "https://")):
        raise KnowledgeError("knowledge", f"{shown} is not an address of HTTP", FORMS)
    content = bytearray()
    try:
        with httpx2.stream("GET", address, timeout=60.0, follow_redirects=True) as answer:
            if answer.status_code != 200:
                raise KnowledgeError("knowledge", f"{shown} answers with status {answer.status_code}", remedy)
            for chunk in answer.iter_bytes():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise KnowledgeError("knowledge", f"{shown} has more than {MOST_BYTES >> 20} MiB", remedy)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        problem = f"{shown} cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
        raise KnowledgeError("knowledge", problem, remedy) from error
    return bytes(content)
