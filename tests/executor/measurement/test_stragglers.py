"""Which node is slow: by what its ranks compute, beside what ranks with the same shapes compute elsewhere."""

import random
from collections.abc import Sequence

import pytest

from executor.measurement.timing import slow_nodes
from search_spaces.trial import RankMeasurement
from search_spaces.trial_config import TrialConfig

GPU, CPU = 0.01, 0.04
"""What repeats differ by on such machines."""


def rank(number: int, node: str, compute: float | None, error: float | None = 0.005) -> RankMeasurement:
    return RankMeasurement(
        rank=number, host="host", node=node, peak_memory_bytes=0, memory_by_tag={}, tag_peak_bytes={}, rss_peak_bytes=0,
        cpu_seconds_per_step=0.0, collectives=(), compute_seconds_per_step=compute, wait_seconds_per_step=0.0,
        compute_relative_error=error,
    )  # fmt: skip


def blamed(nodes: str, seconds: Sequence[float | None], between: float = GPU, config: TrialConfig | None = None) -> list[str]:
    ranks = [rank(number, node, took) for number, (node, took) in enumerate(zip(nodes, seconds, strict=True))]
    return [event.node for event in slow_nodes(config or TrialConfig(), ranks, between)]


def test_a_rank_that_is_behind_the_others_by_more_than_noise_is_slow() -> None:
    assert blamed("aabbcc", [1.0, 1.01, 1.0, 1.12, 0.99, 1.0]) == ["b"]
    assert blamed("aabbcc", [1.0, 1.01, 1.0, 1.07, 0.99, 1.0]) == [], "5 % and three errors"
    assert blamed("aabbcc", [1.0, 1.01, 1.0, 1.12, 0.99, 1.0], CPU) == [], "on a noisy machine that is nothing"
    assert blamed("aabbcc", [1.0, 1.01, 1.0, 1.30, 0.99, 1.0], CPU) == ["b"]
    assert blamed("abcde", [1.0, 1.4, 1.01, 1.3, 1.0]) == ["b", "d"]


def test_a_rank_that_says_itself_how_unsure_it_is_is_believed() -> None:
    ranks = [rank(0, "a", 1.0), rank(1, "b", 1.15, error=0.05), rank(2, "c", 1.0)]
    assert slow_nodes(TrialConfig(), ranks, GPU) == []


@pytest.mark.parametrize("unknown", [None, 0.0])
def test_ranks_that_tell_no_times_are_left_out(unknown: float | None) -> None:
    assert blamed("abc", [1.0, unknown, 1.5]) == ["c"]
    assert blamed("abc", [1.0, unknown, unknown]) == []
    assert slow_nodes(TrialConfig(), [rank(0, "a", 1.0), rank(1, "b", 2.0, error=None)], GPU) == []


def test_on_one_node_nobody_is_to_blame() -> None:
    assert blamed("aaaa", [1.0, 1.0, 1.0, 3.0], 0.0) == []


def test_stages_of_a_pipeline_have_their_own_times() -> None:
    config = TrialConfig(pipeline_parallel_size=2)
    # Ranks 0 and 1 are the first stage, on two nodes; 2 and 3 the last one, which takes twice as long.
    assert blamed("abab", [1.0, 1.0, 2.0, 2.02], config=config) == []
    assert blamed("abab", [1.0, 1.0, 2.0, 2.6], config=config) == ["b"]
    assert blamed("abab", [1.0, 1.0, 2.0, 2.6]) == [], "held against the other stage, it is one of many"


def test_a_layout_that_is_not_that_of_the_ranks_blames_nobody() -> None:
    assert blamed("abc", [1.0, 1.0, 9.0], config=TrialConfig(tensor_parallel_size=4)) == []


@pytest.mark.prove
@pytest.mark.parametrize("between", [GPU, CPU])
def test_chance_blames_no_node(between: float) -> None:
    """200 jobs of 20 trials on 16 ranks of 4 nodes, as noisy as they are taken for and half as noisy again."""
    rng = random.Random(8)
    for noise, bound in ((1.0, 0), (1.5, 14)):
        alarms = 0
        for _ in range(200):
            trials = ([rng.gauss(1.0, noise * between) for _ in range(16)] for _ in range(20))
            alarms += any(blamed("aaaabbbbccccdddd", seconds, between) for seconds in trials)
        assert alarms <= bound, noise
