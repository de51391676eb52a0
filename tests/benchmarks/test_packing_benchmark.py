"""What `make bench` says of packed and padded documents follows from what was measured."""

import dataclasses

import pytest

from benchmarks.engines.packing import BOUND, MEDIANS, ROWS, SEQUENCE, Found, page, problems, skewed

LENGTHS = (SEQUENCE, SEQUENCE // 2, SEQUENCE // 2)
FOUND = Found(median=96, lengths=LENGTHS, off=0.0, seconds=((2.0, 1.0), (2.0, 1.0), (2.0, 1.0)))


def test_rates_are_of_useful_tokens() -> None:
    """Packed, two whole rows; padded, three of two thirds. A packed step that takes twice as long gains 3/2 of 1/2."""
    assert FOUND.shares == pytest.approx((1.0, 2 / 3))
    assert FOUND.rates() == pytest.approx((ROWS * SEQUENCE / 2, ROWS * SEQUENCE * 2 / 3))
    gain = FOUND.gain()
    assert (gain.mean, gain.low, gain.high) == pytest.approx((0.75, 0.75, 0.75))
    assert "| 66.7% | 100.0% | 1,365 | 1,024 | 0.75 [0.75, 0.75] | 1.50 |" in page([FOUND], 3)


@pytest.mark.parametrize("off", [2 * BOUND, float("nan")])
def test_training_that_differs_is_told(off: float) -> None:
    (told,) = problems([dataclasses.replace(FOUND, off=off)])
    assert told.startswith("documents of 96 tokens: packed and padded differ by ")
    assert [*problems([FOUND])] == []


def test_lengths_are_skewed_and_the_same_every_time() -> None:
    for median in MEDIANS:
        lengths = skewed(median)
        assert lengths == skewed(median)
        assert 1 <= min(lengths) < median < max(lengths) <= SEQUENCE
        assert sum(lengths) / len(lengths) > median
