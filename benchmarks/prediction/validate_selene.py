"""Iteration times of four models on Selene, each predicted by one efficiency curve that was fitted to the other three.

    python -m benchmarks.prediction.validate_selene [--data ../shared/data]

The curve is that of matrix products over their shape: `matrix_efficiency`, `rows_half` and `width_half` of
`autotune/prediction/equations/coefficients.py`. Everything else keeps its prior.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from autotune.knowledge.row import step_seconds
from autotune.knowledge.row_cases import cases_of_rows
from autotune.knowledge.table import read_table
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.fitting.trial_fit import fitted
from benchmarks.prediction.validate_targets import Line

CURVE = ("matrix_efficiency", "rows_half", "width_half")
NOISE = 0.03
MEAN, MOST = 0.035, 0.08


def errors(data: Path) -> dict[str, float]:
    """Row -> predicted / measured - 1, without fitting to the row's model."""
    rows = read_table(data / "selene_iteration_times.csv").rows
    cases, times = cases_of_rows(rows), np.array([step_seconds(row) or np.nan for row in rows])
    models = np.array([row.model_name for row in rows])
    found = {}
    for model in dict.fromkeys(models):
        others = np.flatnonzero(models != model)
        known = cases.take(others)
        rates = fitted(CURVE, Coefficients(), lambda tried, known=known: seconds_of(known, tried), times[others], NOISE)
        predicted = seconds_of(cases, rates)
        found |= {rows[i].row_id: float(predicted[i] / times[i] - 1) for i in np.flatnonzero(models == model)}
    return found


def lines(data: Path) -> list[Line]:
    """The two targets."""
    if not (data / "selene_iteration_times.csv").exists():
        return []
    sizes = np.abs(list(errors(data).values()))
    mode = "one curve of 3 coefficients, each model left out"
    return [
        Line(
            target=f"Selene: {name} error of iteration time",
            mode=mode,
            bound=f"at most {100 * bound:.1f} %",
            figure=f"{100 * value:.1f} %, of {len(sizes)} rows",
            held=bool(value <= bound),
        )
        for name, value, bound in (("mean", sizes.mean(), MEAN), ("largest", sizes.max(), MOST))
    ]


def main() -> int:
    """Print each row's error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    options = parser.parse_args()
    for row, error in errors(options.data).items():
        print(f"{row:32} {100 * error:+.1f} %")
    for line in lines(options.data):
        print(line.target, line.figure, line.bound)
    return 0


if __name__ == "__main__":
    sys.exit(main())
