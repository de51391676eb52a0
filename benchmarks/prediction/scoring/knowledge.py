"""Rows of other tables and jobs from which predictions of a table's rows may learn: none that states its answers."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import RequestError
from autotune.knowledge.read import read_knowledge
from autotune.knowledge.row import TableRow, peak_bytes, step_seconds
from autotune.knowledge.table import MeasurementTable
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.table_predictor import TablePredictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The rows that predictions may learn from."""

    rows: tuple[TableRow, ...]
    copies: int
    """Rows left out because the table has the same measurement."""
    of_the_table: int
    """Rows left out because the calibration leaves their source, or group, out of the table too."""


def admitted(knowledge: Sequence[TableRow], table: Sequence[TableRow], calibrate: Calibration) -> Admitted:
    """Leave out the table's own measurements, by whatever name, and what the calibration leaves out."""
    answers = {_measurement(row) for row in table}
    others = [row for row in knowledge if _measurement(row) not in answers]
    left_out = {_key(row, calibrate) for row in table} - {None}
    rows = tuple(row for row in others if _key(row, calibrate) not in left_out)
    return Admitted(rows=rows, copies=len(knowledge) - len(others), of_the_table=len(others) - len(rows))


def _key(row: TableRow, calibrate: Calibration) -> tuple[str, str | None] | None:
    if calibrate is Calibration.NONE:
        return None
    if calibrate is Calibration.LEAVE_GROUP_OUT:
        return (row.source, row.rank_group) if row.rank_group else None
    return row.source, None


def _measurement(row: TableRow) -> tuple[object, ...]:
    shape = (row.num_layers, row.hidden, row.seq_len, row.num_gpus, row.tp, row.pp, row.cp, row.zero_stage, row.micro_batch)
    figures = [None if value is None else f"{value:.4g}" for value in (step_seconds(row), peak_bytes(row))]
    return (*shape, *figures, row.outcome)


def informed_predictor(knowledge: str, table: MeasurementTable, calibrate: Calibration) -> TablePredictor:
    """The analytic model with the shipped coefficients, and with the measurements that the user names to learn from.

    Raises:
        KnowledgeError, MeasurementsError, RequestError: these cannot be read, or none of them may be learned from.
    """
    given = read_knowledge(knowledge)
    found = admitted(given.rows, table.rows, calibrate)
    notes = [*given.notes, f"{len(found.rows):,} rows of {knowledge} are learned from"]
    if found.copies:
        notes.append(f"{found.copies:,} rows of {knowledge} left out: the table has the same measurements")
    if found.of_the_table:
        notes.append(f"{found.of_the_table:,} rows of {knowledge} left out: {calibrate} leaves them out of the table too")
    print("\n".join(notes), file=sys.stderr)
    if not found.rows:
        raise RequestError(
            "knowledge", f"no row of {knowledge} may be learned from", "give other measurements than the table's"
        )
    return TablePredictor().informed(found.rows)
