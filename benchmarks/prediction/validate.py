"""Compare predicted times, memory, out-of-memory verdicts and rankings with a table of measurements.

    python -m benchmarks.prediction.validate TABLE.csv [--calibrate leave-group-out] [--json] [--markdown page.md]

docs/prediction-model.md defines the scores. `benchmarks.prediction.validation` does this in every mode on published tables.
"""

import argparse
import sys
from collections.abc import Sequence

from autotune.knowledge.table import read_table
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.forecasts import Protocol
from benchmarks.prediction.scoring.knowledge import informed_predictor
from benchmarks.prediction.scoring.markdown import markdown_page
from benchmarks.prediction.scoring.outcomes import NO_LABELS, read_labels
from benchmarks.prediction.scoring.program import report, table_parser
from benchmarks.prediction.scoring.report import Document, validate
from benchmarks.prediction.scoring.table_predictor import TablePredictor


def validated(arguments: argparse.Namespace) -> Document:
    """The report on the table that the arguments name."""
    protocol = Protocol(
        calibrate=Calibration(arguments.calibrate),
        calibration_rows=arguments.calibration_rows,
        min_timed=arguments.min_timed,
        seed=arguments.seed,
    )
    table = read_table(arguments.table)
    labels = read_labels(arguments.labels) if arguments.labels else NO_LABELS
    predictor = TablePredictor()
    if arguments.knowledge is not None:
        predictor = informed_predictor(arguments.knowledge, table, protocol.calibrate)
    return validate(table, predictor, protocol, labels)


def main(words: Sequence[str] | None = None) -> int:
    parser = table_parser(__doc__, list(Calibration), Calibration.NONE)
    parser.add_argument("--calibration-rows", type=int, default=3, help="measured rows of each source for few-rows")
    return report(parser.parse_args(words), validated, markdown_page)


if __name__ == "__main__":
    sys.exit(main())
