"""Groups of small tables, as strategies meet them."""

from pathlib import Path
from typing import Any

from measurements import write_table

from autotune.evaluation.search_benchmark.groups import Gathered, gather_groups
from autotune.evaluation.table_predictor import TablePredictor
from autotune.evaluation.validation.facts import gather_facts
from autotune.evaluation.validation.folds import Calibration
from autotune.evaluation.validation.outcomes import NO_LABELS, Labels
from autotune.evaluation.validation.table import read_table


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
