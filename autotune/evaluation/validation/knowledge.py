"""Rows of other tables and jobs from which predictions of a table's rows may learn: none that states its answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.evaluation.validation.folds import Calibration
from autotune.evaluation.validation.row import Row
from autotune.evaluation.validation.truth import peak_bytes, step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The rows that predictions may learn from."""

    rows: tuple[Row, ...]
    copies: int
    """Rows left out because the table has the same measurement."""
    of_the_table: int
    """Rows left out because the calibration leaves their source, or group, out of the table too."""


def admitted(knowledge: Sequence[Row], table: Sequence[Row], calibrate: Calibration) -> Admitted:
    """Leave out the table's own measurements, by whatever name, and what the calibration leaves out."""
    answers = {_measurement(row) for row in table}
    others = [row for row in knowledge if _measurement(row) not in answers]
    left_out = {_key(row, calibrate) for row in table} - {None}
    rows = tuple(row for row in others if _key(row, calibrate) not in left_out)
    return Admitted(rows=rows, copies=len(knowledge) - len(others), of_the_table=len(others) - len(rows))


def _key(row: Row, calibrate: Calibration) -> tuple[str, str | None] | None:
    if calibrate is Calibration.NONE:
        return None
    if calibrate is Calibration.LEAVE_GROUP_OUT:
        return (row.source, row.rank_group) if row.rank_group else None
    return row.source, None


def _measurement(row: Row) -> tuple[object, ...]:
    shape = (row.num_layers, row.hidden, row.seq_len, row.num_gpus, row.tp, row.pp, row.cp, row.zero_stage, row.micro_batch)
    figures = [None if value is None else f"{value:.4g}" for value in (step_seconds(row), peak_bytes(row))]
    return (*shape, *figures, row.outcome)
