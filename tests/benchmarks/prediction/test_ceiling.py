"""The ceiling of a perfect predictor, on sweeps whose truth is known."""

from collections.abc import Callable

import numpy as np
import pytest

from autotune.knowledge.row import RowOutcome, TableRow
from autotune.prediction.planning.depth import spearman
from benchmarks.prediction.scoring.ceiling import group_ceiling, noises
from benchmarks.prediction.scoring.facts import Candidate, gather_facts
from benchmarks.prediction.scoring.outcomes import NO_LABELS, Fate

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

Shape = Callable[[np.random.Generator], Floats]
SHAPES: dict[str, Shape] = {
    "normal": lambda random: random.normal(size=60),
    "dense at the top": lambda random: -np.abs(random.normal(size=60)),
}
"""Log throughputs of a sweep."""


def candidates(rates: Floats) -> list[Candidate]:
    return [Candidate(rows=(0,), rate=float(rate), repeats=1, fate=Fate.RAN) for rate in rates]


@pytest.mark.prove(every=4)
@pytest.mark.parametrize(("spread", "deviation"), [(0.15, 0.01), (0.15, 0.05), (0.8, 0.05), (0.8, 0.12)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_what_the_truth_reaches(shape: Shape, spread: float, deviation: float) -> None:
    """The mean over sweeps of 60 configurations. Where the top is dense it may be too high, which asks more of a predictor."""
    random = np.random.default_rng(5)
    said, reached, correlations = [], [], []
    for _ in range(40):
        truth = shape(random) * spread
        measured = truth + deviation * random.standard_normal((200, 60))
        ceiling = group_ceiling(candidates(np.exp(measured[0])), deviation, random)
        said.append(ceiling.predicted_best_share)
        reached.append(np.exp(measured[:, truth.argmax()] - measured.max(axis=1)).mean())
        correlations.append((ceiling.spearman or 0.0) - (spearman(truth, measured[0]) or 0.0))
    assert -0.015 < np.mean(said) - np.mean(reached) < 0.05
    assert abs(np.mean(correlations)) < 0.03


def test_edges() -> None:
    random = np.random.default_rng(1)
    assert group_ceiling(candidates(np.array([5.0])), 0.1, random).spearman is None
    equal = group_ceiling(candidates(np.full(9, 5.0)), 0.1, random)
    assert (equal.predicted_best_share, equal.spearman) == (1, None)
    clear = group_ceiling(candidates(np.array([1.0, 10.0, 100.0])), 0.0, random)
    assert (clear.predicted_best_share, clear.spearman) == (1, pytest.approx(1))
    drowned = group_ceiling(candidates(np.exp(random.normal(0, 0.01, 50))), 0.5, random)
    assert abs(drowned.spearman or 0) < 0.1
    many = group_ceiling(candidates(np.exp(random.normal(0, 1, 3000))), 0.01, random)
    assert many.predicted_best_share > 0.97


def repeated(pairs: list[tuple[float, float]]) -> list[TableRow]:
    return [
        TableRow(
            line=2,
            row_id=f"{number}-{rate}",
            rank_group="g",
            num_layers=number + 1,
            outcome=RowOutcome.OK,
            step_time_s=1 / rate,
        )
        for number, pair in enumerate(pairs)
        for rate in pair
    ]


def test_noise_is_told_from_repeats() -> None:
    random = np.random.default_rng(3)
    pairs = [tuple(np.exp(random.normal(number, 0.05, 2)).tolist()) for number in range(200)]
    noise = noises(gather_facts(repeated(pairs), NO_LABELS))[""]
    assert (noise.assumed, noise.repeated) == (False, 200)
    assert noise.deviation == pytest.approx(0.05, rel=0.15)


def test_a_wild_repeat_does_not_tell_the_noise() -> None:
    pairs = [(1.0, 1.02), (1.0, 1.01), (1.0, 1.015), (1.0, 9.0)]
    assert noises(gather_facts(repeated(pairs), NO_LABELS))[""].deviation < 0.03


def test_too_few_repeats_and_copies_tell_nothing() -> None:
    for pairs in ([(1.0, 1.1), (1.0, 1.1)], [(1.0, 1.0)] * 9):
        noise = noises(gather_facts(repeated(pairs), NO_LABELS), 0.04)[""]
        assert (noise.assumed, noise.deviation) == (True, 0.04)
