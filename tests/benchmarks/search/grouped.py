"""Groups of small tables, as strategies meet them."""

from pathlib import Path
from typing import Any

from autotune.knowledge.table import read_table
from benchmarks.prediction.scoring.facts import gather_facts
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.outcomes import NO_LABELS, Labels
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.search.tables.groups import Gathered, gather_groups
from tests.autotune.measurements import write_table


def gathered(
    folder: Path,
    rows: list[dict[str, Any]],
    labels: Labels = NO_LABELS,
    min_timed: int = 1,
    calibrate: Calibration = Calibration.NONE,
) -> Gathered:
    """The groups of these rows."""
    facts = gather_facts(read_table(write_table(folder / "t.csv", rows)).rows, labels)
    return gather_groups(facts, TablePredictor(), calibrate, min_timed)
