"""Outcomes of rows' runs, including labels derived by others for failures of unstated cause."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from autotune.errors import MeasurementsError
from autotune.knowledge.row import RowOutcome, TableRow
from autotune.knowledge.table import RowProblem, open_csv

LABEL_COLUMN = "label_DERIVED_HERE"


class Fate(StrEnum):
    """The outcome of a run.

    - ran: it fits.
    - out_of_memory: according to the row, or to a label that calls it certain or likely.
    - failed_otherwise: for another reason than memory, according to the table or a label; whether it fits is unknown.
    - unknown: it failed for an unstated reason, or the table does not state the outcome.
    """

    RAN = "ran"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED_OTHERWISE = "failed_otherwise"
    UNKNOWN = "unknown"


LABELS: Mapping[str, Fate] = {
    "certain_oom_by_states": Fate.OUT_OF_MEMORY,
    "likely_oom": Fate.OUT_OF_MEMORY,
    "likely_not_oom": Fate.FAILED_OTHERWISE,
    "not_oom": Fate.FAILED_OTHERWISE,
    "undetermined": Fate.UNKNOWN,
}

_OF_OUTCOME = {
    RowOutcome.OK: Fate.RAN,
    RowOutcome.OOM: Fate.OUT_OF_MEMORY,
    RowOutcome.ERROR: Fate.FAILED_OTHERWISE,
    RowOutcome.UNKNOWN: Fate.UNKNOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels by row_id, and problems of their file."""

    fates: Mapping[str, Fate]
    problems: tuple[RowProblem, ...] = ()


NO_LABELS = Labels(fates={})


def read_labels(path: Path) -> Labels:
    """Read labels; a row with two different labels, or an unknown one, has none.

    Raises:
        MeasurementsError: the file cannot be read, is not CSV text, or lacks one of the two columns.
    """
    fates: dict[str, Fate] = {}
    problems: list[RowProblem] = []
    with open_csv(path, "a CSV file of labels") as file:
        for column in ("row_id", LABEL_COLUMN):
            if column not in file.header:
                raise MeasurementsError(f"{path}: {column}", "no such column", f"give labels as row_id and {LABEL_COLUMN}")
        for record in file.records:
            row_id, label = record.cells.get("row_id", ""), record.cells.get(LABEL_COLUMN, "")
            fate = LABELS.get(label.lower())
            problem = record.problem
            if not problem and fate is None:
                problem = f"label {label[:40]!r} is none of {', '.join(LABELS)}"
            elif fate and fates.setdefault(row_id, fate) is not fate:
                fates[row_id], problem = Fate.UNKNOWN, "another line labels this row differently: it counts as undetermined"
            if problem:
                problems.append(RowProblem(line=record.line, row_id=row_id, problem=f"labels: {problem}"))
    return Labels(fates=fates, problems=tuple(problems))


def fate_of(row: TableRow, labels: Labels) -> Fate:
    """The outcome; a label is used only if the table does not state why the run failed."""
    if row.outcome is RowOutcome.FAIL_UNKNOWN:
        return labels.fates.get(row.row_id, Fate.UNKNOWN)
    return _OF_OUTCOME[row.outcome]
