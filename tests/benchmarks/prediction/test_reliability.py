"""Reliability diagrams of predictions whose quality is known."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.prediction.scoring.contract import Forecast
from benchmarks.prediction.scoring.facts import Facts
from benchmarks.prediction.scoring.outcomes import Fate
from benchmarks.prediction.scoring.reliability import reliability

COUNT = 4000


def diagrams(wider: float) -> dict[str, Any]:
    """Log-normal times and peaks whose bands are `wider` than stated, and verdicts that hold as stated; two sources."""
    random = np.random.default_rng(0)
    chance, seconds = random.random(COUNT), np.exp(0.1 * random.standard_normal(COUNT))
    fates = np.where(random.random(COUNT) < chance, Fate.RAN, Fate.OUT_OF_MEMORY)
    facts = SimpleNamespace(
        rows=[SimpleNamespace(source="ab"[place % 2]) for place in range(COUNT)], seconds=seconds, bytes=seconds * 1e9,
        pathological=np.zeros(COUNT, dtype=bool), fate_is=lambda fate: fates == fate,
    )  # fmt: skip
    edge = np.exp(1.645 * 0.1 * wider)
    forecast = Forecast(
        step_seconds=np.ones(COUNT), step_seconds_low=np.full(COUNT, 1 / edge), step_seconds_high=np.full(COUNT, edge),
        memory_bytes=np.full(COUNT, 1e9), memory_bytes_low=np.full(COUNT, 1e9 / edge),
        memory_bytes_high=np.full(COUNT, 1e9 * edge), fit_probability=chance,
    )  # fmt: skip
    return reliability(cast(Facts, facts), forecast, np.ones(COUNT, dtype=bool))


def test_calibrated_predictions_lie_on_the_diagonal() -> None:
    found = diagrams(1.0)
    assert sum(each["rows"] for each in found["fit"]) == COUNT
    for each in found["fit"]:
        assert each["ran"] == pytest.approx(each["stated"], abs=0.06)
    for levels in found["bands"].values():
        for each in levels:
            assert each["inside"] == pytest.approx(each["stated"], abs=0.02)
            assert each["inside_mean_source"] == pytest.approx(each["stated"], abs=0.02)


def test_narrow_bands_lie_below_it() -> None:
    for each in diagrams(0.5)["bands"]["time"]:
        assert each["inside"] < each["stated"] - 0.1
