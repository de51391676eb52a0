"""Micro-batches that each rank of a pipeline holds at once, on four real ranks, against docs/closed-forms.md."""

from collections.abc import Callable

import pytest
from closed_forms import LONG, RANKS, Layout

from search_spaces.trial import TrialResult

pytestmark = pytest.mark.nightly
"""`make oldest` runs these too."""

Count = Callable[..., TrialResult]

TWO = {"virtual_stages": 2}
SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved_1f1b": TWO,
    "looped_bfs": TWO,
    "interleaved_zero_bubble": TWO,
    "zbv": TWO,
    "dualpipev": TWO,
}
MANY = 16
"""Micro-batches: more than any schedule but GPipe and looped BFS holds."""


def pipeline(schedule: str, **knobs: object) -> Layout:
    fixed = {"pipeline_parallel_size": RANKS, "pipeline_schedule": schedule, "micro_batch_size": 1}
    return Layout(LONG, **{"global_batch_size": MANY, **fixed, **knobs})


def held(result: TrialResult) -> list[float]:
    return [float(most) for most in result.environment["in_flight"].split()]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_holds_what_the_closed_form_says(count: Count, schedule: str) -> None:
    layout = pipeline(schedule, **SCHEDULES[schedule])
    assert held(count(layout)) == [layout.in_flight(place) for place in range(RANKS)]


def test_the_numbers_of_MODELS(count: Count) -> None:
    """p 4, v 2, m 16, spelled out."""
    assert held(count(pipeline("interleaved_1f1b", **TWO))) == [5.5, 4.5, 3.5, 2.5]
    assert held(count(pipeline("1f1b"))) == [4, 3, 2, 1]
    assert held(count(pipeline("dualpipev", **TWO))) == [4.5] * 4
    for schedule in ("interleaved_zero_bubble", "zbv"):
        assert held(count(pipeline(schedule, **TWO))) == [4] * 4


def test_what_a_zero_bubble_schedule_holds_counts_until_the_gradients_of_weights(count: Count) -> None:
    """With one stage a rank it orders forwards and input gradients as 1F1B does, and yet every rank holds as much."""
    peaks = {}
    for schedule in ("1f1b", "interleaved_zero_bubble"):
        result = count(pipeline(schedule, global_batch_size=2 * RANKS), memory=True)
        peaks[schedule] = result.ranks[RANKS - 2].tag_peak_bytes["activations"]
    assert held(count(pipeline("interleaved_zero_bubble"))) == [4] * 4
    # The rank before the last, whose stage is layers alone: 4 micro-batches against 2, less what the output side lets go.
    assert peaks["interleaved_zero_bubble"] > 1.4 * peaks["1f1b"]
