"""Does guided search find the best configuration in a few trials? Strategies compared on published measurements.

    python -m benchmarks.search.search [--data ../shared/data] [--seeds 20] [--draws 8] [--markdown docs/results/search.md]

The measurements are not part of the repository: without them the program prints the reason and measures nothing. Each strategy
runs on every group with eight or more timed rows, with coefficients fitted on all rows but the group's, and on all but its
source's. Then guided runs with deliberately wrong predictions (`wrong_prior.py`).
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from autotune.knowledge.table import MeasurementTable, read_table
from benchmarks.common.written_page import table
from benchmarks.prediction.scoring.facts import Facts, gather_facts
from benchmarks.prediction.scoring.folds import Calibration
from benchmarks.prediction.scoring.outcomes import Labels, read_labels
from benchmarks.prediction.scoring.table_predictor import TablePredictor
from benchmarks.search import wrong_prior, wrong_verdicts
from benchmarks.search.contestants import CONTESTANTS
from benchmarks.search.search_targets import GROUP, SOURCE, TARGETS, Document, Line, transfers
from benchmarks.search.tables.groups import gather_groups
from benchmarks.search.tables.markdown import group_tables, method_lines, source_tables, stops
from benchmarks.search.tables.report import RULES, document
from benchmarks.search.tables.tournament import Rounds, play_all, predict_groups, workers

HELD = {True: "held", False: "**missed**", None: "not measured"}
TITLES = {GROUP: "Fitted on everything but the group", SOURCE: "Fitted on the other sources"}


class Search:
    """Runs all games and collects their results."""

    def __init__(self, data: Path, rounds: Rounds, draws: int, factors: Sequence[float]) -> None:
        self._table: MeasurementTable = read_table(data / "measured.csv")
        self._labels: Labels = read_labels(data / "failure_labels.csv")
        self._facts: Facts = gather_facts(self._table.rows, self._labels)
        self._rounds = rounds
        self._wrongs = wrong_prior.drawn(draws)
        self.documents: dict[Calibration, Document] = {}
        self.wrong: list[wrong_prior.Measured] = []
        self.shifted: list[wrong_verdicts.Shifted] = []
        self._data, self._factors = data, factors

    def measure(self) -> None:
        """Play with both fits. Wrong predictions use the first fit's coefficients, so that nothing is fitted twice."""
        predictor = TablePredictor()
        with workers(0) as spread:
            for mode in TITLES:
                rounds = replace(self._rounds, calibrate=mode)
                gathered = gather_groups(self._facts, predictor, mode, rounds.min_timed)
                disturbs = (None, *(self._wrongs if mode is GROUP else ()))
                known, *wrong = predict_groups(gathered, predictor, spread, disturbs)
                print(f"{mode}: {len(gathered.groups)} groups predicted", flush=True)
                games = play_all(gathered.groups, known, rounds, spread, _print_progress)
                self.documents[mode] = document(self._table, self._facts, gathered, games, rounds, self._labels)
                if wrong:
                    self.wrong = wrong_prior.measure(gathered, wrong, self._wrongs, games, rounds, spread)
            self.shifted = wrong_verdicts.measure(self._data, spread, self._factors)


def page(
    documents: Mapping[Calibration, Document],
    lines: list[Line],
    wrong: list[wrong_prior.Measured],
    shifted: list[wrong_verdicts.Shifted],
    seconds: float,
) -> str:
    """The Markdown page."""
    cells = [[line.target, line.bound, line.figure, HELD[line.held], line.oracle] for line in lines]
    held, missed = (sum(line.held is value for line in lines) for value in (True, False))
    parts = [
        "# Strategies against each other",
        "",
        f"Written by `make search` in {seconds:.0f} s: `python -m benchmarks.search.bench_search` on published measurements.",
        "`guided` predicts every candidate, and corrects its predictions with each trial.",
        "[How long it takes to decide](decision-time.md).",
        "",
        f"{held} of {len(lines)} targets of `guided` are held, {missed} missed.",
        "",
        *table(["target", "bound", "figure", "", "oracle at 5, 10 % noise"], cells),
        "",
    ]
    for mode, title in TITLES.items():
        parts += [f"## {title}", "", *(f"- {sentence}." for sentence in method_lines(documents[mode])), ""]
        parts += source_tables(documents[mode], level="###")
    parts += [
        "## With deliberately wrong predictions", "",
        "After fitting, coefficients are multiplied by random factors, a different draw in each line: "
        + ", ".join(f"{name} ({', '.join(f'`{each}`' for each in ours)}) by {low:g}–{high:g}"
                    for name, (ours, low, high) in wrong_prior.RANGES.items())
        + ". Shares of `guided`, and in parentheses how far it is ahead of `tpe`.", "", *wrong_prior.page(wrong), "",
        "## With every memory verdict shifted", "",
        "Fitted on the other sources of all tables; every predicted memory is multiplied before the first trial.",
        "", *wrong_verdicts.page(shifted), "",
    ]  # fmt: skip
    parts += [
        "## When it is sure to be done", "",
        "95 % sure that no untried configuration is more than 2 % faster (`--stop-margin 0.02`), within the trials played.",
        "", *stops(documents[GROUP]), "",
    ]  # fmt: skip
    parts += ["## Groups", "", f"{TITLES[GROUP]}, `guided`.", "", *group_tables(documents[GROUP], "guided"), ""]
    parts += ["## How it is played", "", *(f"- {rule}." for rule in RULES), ""]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument(
        "--strategies",
        default=",".join(name for name in CONTESTANTS if name != "smac" or find_spec("smac")),
        help="guided and tpe must be among them",
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--draws", type=int, default=wrong_prior.DRAWS)
    parser.add_argument(
        "--memory-factors", type=lambda text: [float(each) for each in text.split(",")], default=wrong_verdicts.FACTORS,
        help="factors on every predicted memory, with commas between",
    )  # fmt: skip
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    for name in ("measured.csv", "failure_labels.csv"):
        if not (arguments.data / name).is_file():
            print(f"{arguments.data / name} not found: nothing is measured; give its folder: make search DATA=FOLDER")
            return 2
    began = time.monotonic()
    search = Search(
        arguments.data,
        Rounds(strategies=tuple(arguments.strategies.split(",")), seeds=arguments.seeds),
        arguments.draws,
        arguments.memory_factors,
    )
    search.measure()
    lines = (
        [target.line(search.documents) for target in TARGETS] + transfers(search.documents) + wrong_prior.lines(search.wrong)
    )
    lines += wrong_verdicts.lines(search.shifted)
    text = page(search.documents, lines, search.wrong, search.shifted, time.monotonic() - began)
    print("\n".join(f"{HELD[line.held]:12} {line.target}: {line.figure} ({line.bound}) {line.oracle}" for line in lines))
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")
    return 0 if all(line.held for line in lines) else 1


def _print_progress(what: str, done: int, total: int) -> None:
    if done % 20 == 0 or done == total:
        print(f"{done} of {total} {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
