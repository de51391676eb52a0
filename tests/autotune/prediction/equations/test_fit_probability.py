"""The probability that memory suffices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.prediction.planning.memory_fit import fit_probability, margin_of, probability_within


@given(st.floats(1e-6, 1 - 1e-6))
def test_a_margin_is_the_inverse_of_its_probability(probability: float) -> None:
    assert probability_within(np.array([margin_of(probability)]))[0] == pytest.approx(probability, rel=1e-6)


def test_the_upper_edge_of_a_band_of_90_percent_is_exceeded_once_in_twenty() -> None:
    needed = np.array([50e9])
    assert fit_probability(needed, needed * np.exp(1.6448536 * 0.1), 0.1)[0] == pytest.approx(0.95)


def test_it_is_the_share_of_draws_of_its_distribution() -> None:
    errors = np.random.default_rng(0).standard_t(2, 200_000) * 1.6448536 / 2.9199856
    for margin in (-3.0, -1.0, 0.0, 0.5, 2.0):
        assert probability_within(np.array([margin]))[0] == pytest.approx(np.mean(errors <= margin), abs=0.005)
