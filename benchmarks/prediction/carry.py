"""How good carried layouts are on tables of measurements: from each group's best at n devices to 2n and 4n, without a trial.

    python -m benchmarks.prediction.carry measured.csv [--coefficients shipped|leave-source-out]

A group is one model, sequence length, device, precision, framework and global batch of one source. At 2n and 4n devices the
batch is the same, or scaled. Candidates are the measured rows there, those that ran out of memory included. Chosen is, as by
`autotune carry`, the unchanged layout if no other is certainly faster; else the predicted best of those that fit with a
probability of 0.95, or one that predictions cannot distinguish from it, with the fewest changes. Beside it: the predicted
best alone, and the rule "only scale the data degree", where that row was measured. Score: samples/s of the choice over the best
measured ones; 0: it ran out of memory.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from autotune.knowledge.row import RowOutcome, TableRow, step_seconds
from autotune.knowledge.row_cases import refusal
from autotune.knowledge.table import read_table
from autotune.prediction.equations.step import Z90
from autotune.prediction.planning.memory_fit import PROBABILITY, margin_of
from autotune.prediction.planning.ties import RESOLUTION, resolution
from autotune.recipes.candidates import NORMAL_MEDIAN
from benchmarks.prediction.scoring.table_predictor import TablePredictor

LAYOUT = ("tp", "pp", "vpp", "cp", "ep", "zero_stage", "recompute", "micro_batch", "sequence_parallel", "offload")
HEADER = (
    "| source, devices | choices | rows a choice | carry | predicted best alone | estimated from the other rows "
    "| where the unchanged layout was measured: choices | carry | unchanged |"
)
FEWEST = 3
"""Rows of a group at the larger size that make a choice."""
LENGTH, NOISE = 3.0, 0.1
"""Of the estimate from other rows: the best of six pairs tried (0.7, 1.5, 3.0 with 0.1, 0.5), so that it is rather too good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """One choice."""

    source: str
    devices: int
    candidates: int
    carried: float
    predicted: float
    estimated: float
    data_degree: float | None
    """None: that layout was not measured."""


def rate(row: TableRow) -> float:
    """Samples/s; 0: it ran out of memory."""
    seconds = step_seconds(row) if row.outcome is RowOutcome.OK else None
    return (row.global_batch or 0) / seconds if seconds else 0.0


def games(rows: Sequence[TableRow], predictor: TablePredictor) -> list[Game]:
    """Every choice of a table's rows."""
    groups: dict[tuple[object, ...], dict[tuple[int, int], list[TableRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        usable = row.num_gpus and row.global_batch and refusal(row) is None
        if usable and (row.outcome is RowOutcome.OOM or rate(row) > 0):
            key = (row.source, row.model_name, row.seq_len, row.gpu_type, row.precision, row.framework)
            groups[key][row.num_gpus or 0, row.global_batch or 0].append(row)
    found = []
    for sizes in groups.values():
        for (devices, batch), own in sizes.items():
            best = max(own, key=rate)
            if rate(best) == 0.0:
                continue
            for growth in (2, 4):
                for larger in dict.fromkeys((batch, batch * growth)):
                    there = sizes.get((devices * growth, larger), [])
                    if len(there) >= FEWEST and max(map(rate, there)) > 0:
                        found.append(_played(best, there, predictor))
    return found


def _played(best: TableRow, there: Sequence[TableRow], predictor: TablePredictor) -> Game:
    found = predictor.described(there)
    predicted = np.broadcast_to(found.prediction.seconds, len(there)) * np.exp(found.learned)
    likely = math.exp(margin_of(PROBABILITY) * found.rates.memory_spread)
    changes = np.array([_changes(best, row) for row in there])
    fits = found.fullest.needed * found.beyond * likely <= found.fullest.usable(found.cases)
    fits = np.broadcast_to(fits, len(there)) | (changes == 0)  # the unchanged layout ran on fewer devices
    seconds = np.where(fits, predicted, np.inf) if fits.any() else predicted
    first, spread = int(np.argmin(seconds)), found.rates.time_spread
    certain = math.exp(Z90 * RESOLUTION * spread / NORMAL_MEDIAN)
    unchanged = np.flatnonzero((changes == 0) & (seconds <= seconds[first] * certain))
    near = unchanged if len(unchanged) else np.flatnonzero(seconds <= seconds[first] * (1 + resolution(spread)))
    chosen = min(near.tolist(), key=lambda place: (changes[place], seconds[place]))
    same = [row for row in there if _changes(best, row) == 0]
    most = max(map(rate, there))
    return Game(
        source=best.source, devices=there[0].num_gpus or 0, candidates=len(there), carried=rate(there[chosen]) / most,
        predicted=rate(there[first]) / most, estimated=rate(there[_estimated_best(there, predicted)]) / most,
        data_degree=max(map(rate, same)) / most if same else None,
    )  # fmt: skip


def _estimated_best(there: Sequence[TableRow], predicted: NDArray[np.float64]) -> int:
    """The row with the shortest time of those that did not run out of memory, each estimated without its own measurement."""
    ran = [place for place, row in enumerate(there) if rate(row) > 0]
    measured = np.array([(there[place].global_batch or 0) / rate(there[place]) for place in ran])
    residuals = np.log(measured / predicted[ran])
    places = np.array([_place(there[place]) for place in ran])
    alike = np.exp(-np.square(places[:, None] - places).sum(axis=-1) / (2 * LENGTH**2))
    estimates = []
    for own, place in enumerate(ran):
        others = np.arange(len(ran)) != own
        mean = residuals[others].mean()
        weights = np.linalg.solve(alike[np.ix_(others, others)] + NOISE * np.eye(len(ran) - 1), residuals[others] - mean)
        estimates.append(math.log(predicted[place]) + mean + alike[own, others] @ weights)
    return ran[int(np.argmin(estimates))]


def _place(row: TableRow) -> list[float]:
    """Coordinates of a row's layout; degrees as their binary logarithm."""
    degrees = [math.log2(degree or 1) for degree in (row.tp, row.pp, row.vpp, row.micro_batch)]
    return [*degrees, row.zero_stage or 0, row.recompute not in (None, "none"), bool(row.sequence_parallel)]


def _changes(one: TableRow, two: TableRow) -> int:
    return sum(getattr(one, name) != getattr(two, name) for name in LAYOUT)


def main() -> None:
    """Print the scores of each source, and the mean over all choices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--coefficients", choices=("shipped", "leave-source-out"), default="shipped")
    asked = parser.parse_args()
    rows = [row for row in read_table(asked.table).rows if row.outcome in (RowOutcome.OK, RowOutcome.OOM)]
    found: list[Game] = []
    for source in dict.fromkeys(row.source for row in rows):
        predictor = TablePredictor()
        if asked.coefficients == "leave-source-out":
            others = [row for row in rows if row.source != source and refusal(row) is None and row.outcome is RowOutcome.OK]
            predictor = predictor.calibrated(others)
        found += games([row for row in rows if row.source == source], predictor)
    print(f"in sample of the shipped coefficients: {TablePredictor().in_sample(rows)} of {len(rows)} rows")
    print(HEADER)
    print("|---|---|---|---|---|---|---|---|---|")
    for source in dict.fromkeys(game.source for game in found):
        own = [game for game in found if game.source == source]
        for devices in sorted({game.devices for game in own}):
            print(_line(f"{source}, {devices}", [game for game in own if game.devices == devices]))
    print(_line("all up to 256", [game for game in found if game.devices <= 256]))
    print(_line("all", found))


def _line(name: str, own: Sequence[Game]) -> str:
    both = [(game.carried, game.data_degree) for game in own if game.data_degree is not None]
    means = [fmean(score) for score in zip(*both, strict=True)] if both else []
    scores = [fmean(game.carried for game in own), fmean(game.predicted for game in own)]
    scores.append(fmean(game.estimated for game in own))
    cells = [name, str(len(own)), f"{fmean(game.candidates for game in own):.0f}", *(f"{score:.3f}" for score in scores)]
    cells += [str(len(both)), *([f"{score:.3f}" for score in means] or ["", ""])]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
