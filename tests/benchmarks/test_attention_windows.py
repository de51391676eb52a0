"""What `make parity` says of windows of attention is told where it does not hold."""

import pytest

from benchmarks.correctness.attention_windows import BOUND, page, problems, timing
from benchmarks.correctness.loss_of_types import SEEDS, Ends
from search_spaces.training.windows import AttentionWindow

EXACT = Ends(name="all", losses=(2.0,) * SEEDS)


def ends(share: float) -> Ends:
    return Ends(name="16", losses=(2.0 * (1 + share),) * SEEDS)


@pytest.mark.parametrize("share", [1.1 * BOUND, float("nan")])
def test_a_loss_beyond_the_bound_is_told(share: float) -> None:
    (told,) = problems([EXACT, ends(share)])
    assert told.startswith("a window of 16 ends ")


def test_a_loss_within_the_bound_or_below_is_let_pass() -> None:
    assert [*problems([EXACT, ends(0.9 * BOUND), ends(-0.5)])] == []
    assert "| 16 | 2.0200 | 2.0200 | 2.0200 | 2.0200 | 2.0200 | +1.0e-02 | +1.0e-02 |" in page([EXACT, ends(0.01)], 60, 1.0)


def test_times_stand_beside_the_pairs_that_are_computed() -> None:
    text = timing({(2048, AttentionWindow(512)): [0.5, 0.6, 0.7]})
    assert "| 2,048 | 512 | 0 | 55% | 60% | 50% to 70% |" in text
