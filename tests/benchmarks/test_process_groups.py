"""The bounds on groups of 64 ranks, and that a rank that makes others' groups breaks them."""

import dataclasses

import pytest

from benchmarks.engines.process_groups import LAYOUTS, Counted, count, extrapolated, problems


@pytest.mark.parametrize("name", ["tensor 8", "tensor 2, pipeline 4, experts 4, hsdp 4"])
def test_a_rank_calls_once_for_each_dimension_and_joins_its_own_groups(name: str) -> None:
    over_nccl, over_gloo = (count(LAYOUTS[name], 64, bound) for bound in (True, False))
    assert problems({name: over_nccl}) == []
    assert (over_nccl.whole, over_nccl.joined) == (over_gloo.whole, over_gloo.joined)
    assert set(over_gloo.calls) == {over_gloo.whole}


def test_broken_bounds_are_found() -> None:
    right = Counted(calls=(2, 2), dimensions=(2, 2), joined=(2, 2), foreign=0, whole=4)
    assert problems({"right": right}) == []
    for wrong in ({"calls": (4, 4)}, {"joined": (2, 3)}, {"foreign": 1}):
        assert len(problems({"wrong": dataclasses.replace(right, **wrong)})) == 1  # type: ignore[arg-type]


def test_seconds_of_a_call_grow_as_between_the_measured_sizes() -> None:
    middle, low, high = extrapolated({8: 0.8, 16: 3.2}, {8: 8, 16: 16}, 10)
    assert (middle, low, high) == pytest.approx((10 * 0.2 * 4, 10 * 0.2, 10 * 0.2 * 16))
