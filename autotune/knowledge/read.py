"""Knowledge as users name it: a table, a bundle, a job of the database, or the address of a table or a bundle."""

import csv
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from autotune.errors import KnowledgeError
from autotune.evaluation.validation.columns import COLUMNS
from autotune.evaluation.validation.row import Row
from autotune.evaluation.validation.table import read_records, read_table
from autotune.imports.history import RATES
from autotune.knowledge.bundle import Bundle, distinct, read_bundle
from autotune.knowledge.collect import job_measurements
from autotune.knowledge.measurement import Collected, Measurement, measurements_of_rows
from autotune.knowledge.mlperf import has_log, logs_of, read_log
from autotune.knowledge.signature import fingerprint, trusted_keys
from storage.address import default_database_url, without_password
from storage.store import open_store

MOST_BYTES = 1 << 28
FORMS = (
    "give a table, a bundle, an MLPerf log or a folder of them, a job of the database, or the address of a table or a bundle"
)
_SECONDS = 60.0
_STUDIES = (".db", ".sqlite", ".sqlite3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """Measurements of trusted sources."""

    source: str
    """As the user named it."""
    rows: tuple[Row, ...]
    """In the columns of tables."""
    table: bool
    """Whether the rows are those of a table, and not yet in known words."""
    bundled: tuple[Measurement, ...]
    """Of a bundle or a job."""
    notes: tuple[str, ...]
    """A line for everything that is left out."""

    def measurements(self) -> Collected:
        """The measurements in known words."""
        if not self.table:
            return Collected(measurements=self.bundled, left_out={})
        return measurements_of_rows(self.rows, {row.source: row.source or "table" for row in self.rows})


def read_knowledge(source: str, database: str | None = None) -> Knowledge:
    """Read what the user names.

    Args:
        source: a path, an address, or a job's id.
        database: the database of the job; None: the default one.

    Raises:
        KnowledgeError: it cannot be read, is damaged or forged, or comes from nobody whom the user trusts.
        MeasurementsError: a table cannot be read.
        LookupError: there is no such job.
    """
    if "://" in source and not source.startswith("sqlite:"):
        return _downloaded(source)
    if Path(source).is_dir():
        return _of_logs(logs_of(Path(source)), source)
    if Path(source).is_file():
        return _of_file(Path(source), source)
    if "/" in source or source.endswith((".csv", ".json", *_STUDIES)):
        raise KnowledgeError("knowledge", f"{source} does not exist", FORMS)
    with open_store(database or default_database_url()) as store:
        found = job_measurements(store, store.job(source).id)
    return _of_measurements(source, found.measurements, found.lines(source))


def is_history(source: str) -> bool:
    """Whether it holds trials of the job's own model, batch and hardware: an Optuna study, or a table of knobs and rates."""
    address = source.partition("#")[0]
    if source.startswith("sqlite:") or "#" in source or address.endswith(_STUDIES):
        return True
    if "://" in source or not Path(source).is_file() or is_bundle(Path(source)):
        return False
    try:
        with Path(source).open(newline="", encoding="utf-8-sig", errors="replace") as file:
            header = {name.strip() for name in next(csv.reader(file), [])}
    except (OSError, csv.Error):
        return False
    essential = {name for name, column in COLUMNS.items() if column.essential}
    return not essential <= header and bool(header & {*RATES})


def is_bundle(path: Path) -> bool:
    """Whether the file is JSON, and so no table."""
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"{")


def trusted(bundle: Bundle, name: str) -> tuple[Bundle, tuple[str, ...]]:
    """The parts of a bundle whose keys are trusted, and a line for each other key.

    Raises:
        KnowledgeError: none is trusted.
    """
    known = trusted_keys()
    kept = tuple(part for part in bundle.parts if part.key in known)
    others = sorted({fingerprint(part.key) for part in bundle.parts if part.key not in known})
    remedy = f"record it with: autotune knowledge check {name} --public-key KEY.pub --record NAME"
    if not kept:
        raise KnowledgeError(name, f"is signed by {', '.join(others)}, a key that is not trusted", remedy)
    return Bundle(parts=kept), tuple(
        f"{name}: part signed by {key} left out: the key is not trusted; {remedy}" for key in others
    )


def _of_file(path: Path, name: str) -> Knowledge:
    try:
        json = is_bundle(path)
        text = path.read_text(encoding="utf-8") if json else ""
    except (OSError, UnicodeDecodeError) as error:
        raise KnowledgeError("knowledge", f"{name} cannot be read ({error})", FORMS) from error
    if json:
        bundle, notes = trusted(read_bundle(text, name), name)
        return _of_measurements(name, distinct(bundle.parts), notes)
    if not json and has_log(path):
        return _of_logs([path], name)
    table = read_table(path)
    skipped = len(table.skipped)
    notes = Collected(measurements=(), left_out={"it cannot be read as a row": skipped} if skipped else {}).lines(name)
    return Knowledge(source=name, rows=table.rows, table=True, bundled=(), notes=notes)


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
    return Knowledge(source=name, rows=rows, table=True, bundled=(), notes=notes)


def _of_measurements(name: str, measurements: tuple[Measurement, ...], notes: tuple[str, ...]) -> Knowledge:
    if not measurements:
        raise KnowledgeError("knowledge", f"{name} has no measurement", "; ".join(notes) or FORMS)
    rows = tuple(each.row for each in measurements if each.row is not None)
    return Knowledge(source=name, rows=rows, table=False, bundled=measurements, notes=notes)


def read_text(source: str) -> str:
    """The text of a bundle: of a file, or at an address.

    Raises:
        KnowledgeError: it cannot be read.
    """
    if "://" in source:
        return _download(source).decode("utf-8", errors="replace")
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({error.strerror if isinstance(error, OSError) else 'it is not UTF-8 text'})"
        raise KnowledgeError(source, problem, "give the path or the address of a bundle") from error


def _downloaded(address: str) -> Knowledge:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "knowledge"
        file.write_bytes(_download(address))
        return _of_file(file, address)


def _download(address: str) -> bytes:
    shown, remedy = without_password(address), "check the address, or download the file and give its path"
    if not address.startswith(("http://", "https://")):
        raise KnowledgeError("knowledge", f"{shown} is not an address of HTTP", FORMS)
    found = bytearray()
    try:
        with httpx2.stream("GET", address, timeout=_SECONDS, follow_redirects=True) as answer:
            if answer.status_code != 200:
                raise KnowledgeError("knowledge", f"{shown} answers with status {answer.status_code}", remedy)
            for chunk in answer.iter_bytes():
                found += chunk
                if len(found) > MOST_BYTES:
                    raise KnowledgeError("knowledge", f"{shown} has more than {MOST_BYTES >> 20} MiB", remedy)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        problem = f"{shown} cannot be reached ({' '.join(str(error).split()) or type(error).__name__})"
        raise KnowledgeError("knowledge", problem, remedy) from error
    return bytes(found)
