"""What rows of a table compare by: their configuration, and what a table without a column loses."""

from collections.abc import Mapping
from typing import Any

from autotune.knowledge.row import COLUMNS, TIME_COLUMNS, TableRow
from autotune.knowledge.table import MeasurementTable, RowProblem

_FREE_TEXT = frozenset({"row_id", "source_locator", "notes", "outcome", "mem_kind", "tflops_kind"})
CONFIGURATION_FIELDS = tuple(name for name, column in COLUMNS.items() if not column.measured and name not in _FREE_TEXT)
_LOST: Mapping[str, str] = {
    "source": "all rows count as one source: figures and calibration by source are meaningless",
    "model_name": "models are distinguished only by their shapes",
    "global_batch": "a step counts as one micro-batch unless the notes name more",
    "peak_mem_gb": "memory error is not scored",
    "notes": "attention kernels and noted gradient accumulation are unknown",
    "outcome": "how runs ended is taken from the column oom and from what was measured",
    "mem_kind": "peak memory counts as GB of 1e9 bytes",
    "rank_group": "ranks are not scored",
    "row_id": "rows are named by their lines, and labels match none",
}
"""Column -> scores that a table without it lacks, or assumptions made instead."""


def configuration_of(row: TableRow) -> tuple[Any, ...]:
    """The configuration without results: rows with equal ones are repeats."""
    return (*(getattr(row, name) for name in CONFIGURATION_FIELDS), row.kernel, *sorted(row.arguments.items()))


def problems_of(table: MeasurementTable) -> list[RowProblem]:
    """All problems of a table, with the loss for each column that it lacks; columns that no score needs are omitted."""
    missing = table.missing_columns
    lost = {name: text for name, text in _LOST.items() if name in missing}
    if missing.issuperset(TIME_COLUMNS):
        lost[", ".join(TIME_COLUMNS)] = "time error and ranks are not scored"
    if missing.issuperset({"outcome", "oom"}):
        lost["outcome, oom"] = "out-of-memory recall is not scored"
    lacking = [RowProblem(line=1, row_id="", problem=f"no column {name}: {text}") for name, text in lost.items()]
    return [*lacking, *table.problems]
