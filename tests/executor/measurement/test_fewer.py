"""A line through two counts of micro-batches."""

import pytest

from executor.measurement.meter import Costs, Line
from search_spaces.trial import CollectiveCount

LINE = Line(first=2, second=6, full=32)


def costs(micro_batches: int) -> Costs:
    """One reduction for each micro-batch, two gathers in a step."""
    sent = [("all_gather", 2, 200), ("reduce_scatter", micro_batches, 10 * micro_batches)]
    return Costs(
        cpu_seconds_per_step=3.0 + 0.5 * micro_batches,
        device_seconds_per_step=1.0 + 0.1 * micro_batches,
        collectives=tuple(CollectiveCount(operation=o, mesh_dimension="data", count=c, bytes=b) for o, c, b in sent),
    )


def test_what_a_step_takes_once_is_counted_once() -> None:
    assert LINE.at_full(3.0 + 2 * 0.5, 3.0 + 6 * 0.5) == pytest.approx(3.0 + 32 * 0.5)


def test_bytes_are_whole_and_never_below_none() -> None:
    found = LINE.tags_at_full({"parameters": 10**18 + 1, "buffers": 900}, {"parameters": 10**18 + 5, "buffers": 100, "late": 4})
    assert found == {"parameters": 10**18 + 31, "buffers": 0, "late": 30}


def test_costs_grow_with_the_micro_batches_and_collectives_exactly() -> None:
    found, expected = LINE.costs_at_full(costs(2), costs(6)), costs(32)
    assert found.collectives == expected.collectives
    assert found.cpu_seconds_per_step == pytest.approx(expected.cpu_seconds_per_step)
    assert found.device_seconds_per_step == pytest.approx(expected.device_seconds_per_step)


def test_a_slope_that_noise_hides_is_seen() -> None:
    assert LINE.rises([1.0, 1.1], [1.2, 1.0])
    assert not LINE.rises([1.2, 1.2], [1.1, 1.2])
