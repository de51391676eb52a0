"""Peak memory of Megatron-LM's own functional tests, predicted from their arguments, and the order of their memory and times.

    python -m benchmarks.prediction.megatron_golden TABLE [--markdown docs/results/megatron-golden.md]

TABLE has the columns of a table of measurements, one for each argument of Megatron-LM (`Megatron`), and the `features` of each
test. Nothing is fitted to it.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autotune.knowledge.row import TableRow, peak_bytes, step_seconds
from autotune.knowledge.row_cases import refusal
from autotune.knowledge.table import open_csv, read_table
from autotune.prediction.planning.depth import spearman
from benchmarks.common.written_page import give, page_parser, table
from benchmarks.prediction.scoring.table_predictor import TablePredictor

MIB = 2**20
SMALL = 64 * MIB
"""Bytes up to which an error counts as none in the tail: as much as two runs of one test can differ."""
CLASS_ROWS = 8
"""Least rows of a class of tests that is scored on its own."""

INTRODUCTION = """\
Written by `python -m benchmarks.prediction.megatron_golden TABLE --markdown docs/results/megatron-golden.md`: the peak memory
that NVIDIA/Megatron-LM records for its functional tests (`golden_values_*.json`, BSD-3-Clause), predicted from their arguments
by the [equations of Megatron-LM](../prediction-model.md#megatron-lm). No coefficient is fitted to them. Torch's allocator adds
up to 1 MiB for each tensor, devices of one name can have cuBLAS workspaces that differ by 48 MiB, and the routing of experts is
not even: all three are in the errors."""


class Judged(NamedTuple):
    """A row with its prediction."""

    row: TableRow
    predicted: float
    """Bytes allocated at the peak of the measured rank."""
    fits: bool
    """Whether the fullest rank is predicted to fit."""
    seconds: float
    features: str
    """The classes of the test, between blanks."""

    @property
    def measured(self) -> float:
        """Bytes."""
        return peak_bytes(self.row) or np.nan

    @property
    def error(self) -> float:
        """Relative error of memory."""
        return self.predicted / self.measured - 1

    @property
    def tail_error(self) -> float:
        """Its size; 0 within `SMALL`."""
        return abs(self.error) if abs(self.predicted - self.measured) > SMALL else 0.0


def judged(path: Path) -> list[Judged]:
    """The rows that ran, with their predictions."""
    rows = [row for row in read_table(path).rows if refusal(row) is None and peak_bytes(row)]
    with open_csv(path, "a table of functional tests") as file:
        features = {record.line: record.cells.get("features", "") for record in file.records}
    forecast = TablePredictor().forecast(rows)
    values = zip(forecast.memory_bytes, forecast.fit_probability >= 0.5, forecast.step_seconds, strict=True)
    return [
        Judged(row, float(allocated), bool(fits), float(seconds), features[row.line])
        for row, (allocated, fits, seconds) in zip(rows, values, strict=True)
    ]


def classes(runs: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Each feature -> the runs that have it, of features with enough runs."""
    by_feature: dict[str, list[Judged]] = defaultdict(list)
    for run in runs:
        for feature in dict.fromkeys(run.features.split()):
            by_feature[feature].append(run)
    return {feature: having for feature, having in sorted(by_feature.items()) if len(having) >= CLASS_ROWS}


def rank_correlations(runs: Sequence[Judged], time: bool) -> list[float]:
    """Of predicted and measured memory, or time, in each group of comparable runs."""
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        measured = step_seconds(run.row) if time else run.measured
        if run.row.rank_group and measured:
            groups[run.row.rank_group].append((run.seconds if time else run.predicted, measured))
    correlations = [spearman(*np.array(pairs).T) for pairs in groups.values() if len(pairs) >= CLASS_ROWS]
    return [value for value in correlations if value is not None]


def percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def page(runs: Sequence[Judged]) -> list[str]:
    """The figures, by class and by row."""
    errors = np.abs([run.error for run in runs])
    tails, beyond = [run.tail_error for run in runs], [run for run in runs if run.tail_error > 0.05]
    alarms = [run.row.row_id for run in runs if not run.fits]
    memory_ranks, time_ranks = rank_correlations(runs, time=False), rank_correlations(runs, time=True)
    figures = [
        ("rows", f"{len(runs)}"),
        ("median error of peak memory", percent(float(np.median(errors)))),
        ("95th percentile, of errors beyond 64 MiB", percent(float(np.quantile(tails, 0.95)))),
        ("rows beyond both 5 % and 64 MiB", f"{len(beyond)}"),
        ("false alarms", f"{len(alarms)}"),
        ("rank correlation of memory, median of groups", f"{np.median(memory_ranks):.3f}" if memory_ranks else "–"),
        ("rank correlation of time, median of groups", f"{np.median(time_ranks):.3f}" if time_ranks else "–"),
    ]
    by_class = [
        (feature, f"{len(having)}", percent(float(np.median(np.abs([run.error for run in having])))))
        for feature, having in classes(runs).items()
    ]
    by_class.sort(key=lambda line: -float(line[2].split()[0]))
    lines = [
        (
            run.row.row_id,
            run.row.gpu_type or "",
            f"{100 * run.error:+.1f} %",
            f"{(run.predicted - run.measured) / MIB:+,.0f}",
            run.features,
        )
        for run in sorted(runs, key=lambda run: -abs(run.error))
    ]
    return [
        "# Predictions against Megatron-LM's functional tests", "",
        *INTRODUCTION.splitlines(), "",
        *table(["", "figure"], figures), "",
        "## By class", "", f"Median error of the classes with at least {CLASS_ROWS} rows.", "",
        *table(["class", "rows", "median error"], by_class), "",
        "## By row", "", "Error of the last rank's peak.", "",
        *table(["row", "device", "error", "MiB", "class"], lines),
    ]  # fmt: skip


def main() -> int:
    """Read, predict, print and write."""
    parser = page_parser(__doc__)
    parser.add_argument("table", type=Path, metavar="TABLE")
    options = parser.parse_args()
    give(page(judged(options.table)), options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
