"""A step measured on a few devices, projected to many."""

import pytest

from autotune.prediction.fitting.residuals import PART_SPREADS, REPEATED, projected

NOTHING = dict.fromkeys(PART_SPREADS, 0.0)
SMALL = NOTHING | {"compute": 1.0, "data": 0.1}


def test_a_step_as_predicted_leaves_the_prediction_of_the_other() -> None:
    large = SMALL | {"data": 0.3}
    assert projected(1.1, SMALL, large)[0] == pytest.approx(1.3)


def test_what_a_step_has_more_goes_to_its_parts_and_with_them_to_the_other() -> None:
    seconds, deviation = projected(1.32, SMALL, SMALL)
    assert seconds == pytest.approx(1.32, rel=0.02)
    assert REPEATED < deviation < 0.1
    computed, _ = projected(1.32, SMALL, NOTHING | {"compute": 1.0})
    assert 1.1 < computed < 1.2


def test_the_band_is_wide_where_a_part_is_large_only_there() -> None:
    _, alike = projected(1.1, SMALL, SMALL)
    _, unlike = projected(1.1, SMALL, SMALL | {"data": 1.0})
    assert unlike > 3 * alike
