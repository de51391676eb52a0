"""Compare strategies on a table of measurements: the share of the best rate found after each number of trials.

    python -m benchmarks.search.bench_search TABLE.csv [--strategies guided,tpe,random] [--json] [--markdown page.md]

The first strategy is compared with the others. `benchmarks.search.search` does this on published tables.
"""

import argparse
import sys
from collections.abc import Sequence

from autotune.knowledge.table import read_table
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.knowledge import informed_predictor
from benchmarks.prediction.scoring.outcomes import NO_LABELS, read_labels
from benchmarks.prediction.scoring.program import report, table_parser
from benchmarks.search.tables.markdown import markdown_page
from benchmarks.search.tables.report import Document, bench_search
from benchmarks.search.tables.tournament import Rounds

MODES = [mode for mode in Calibration if mode is not Calibration.FEW_ROWS]


def benched(arguments: argparse.Namespace) -> Document:
    """The report on the table that the arguments name."""
    rounds = Rounds(
        strategies=tuple(name for each in arguments.strategies.split(",") if (name := each.strip())),
        calibrate=Calibration(arguments.calibrate),
        trials=arguments.trials,
        seeds=arguments.seeds,
        min_timed=arguments.min_timed,
        seed=arguments.seed,
        processes=arguments.processes,
    )
    table = read_table(arguments.table)
    labels = read_labels(arguments.labels) if arguments.labels else NO_LABELS
    knowledge = arguments.knowledge
    predictor = None if knowledge is None else informed_predictor(knowledge, table, rounds.calibrate)
    return bench_search(table, rounds, labels, predictor)


def main(words: Sequence[str] | None = None) -> int:
    parser = table_parser(__doc__, MODES, Calibration.LEAVE_GROUP_OUT)
    parser.add_argument("--strategies", default="guided,tpe,random", help="names with commas between")
    parser.add_argument("--trials", type=int, default=20, help="trials per strategy and group")
    parser.add_argument("--seeds", type=int, default=20, help="runs per strategy and group")
    parser.add_argument("--processes", type=int, default=0, help="number of processes; 0: number of cores")
    return report(parser.parse_args(words), benched, markdown_page)


if __name__ == "__main__":
    sys.exit(main())
