"""Scores by hand: shares by budget, intervals, oracles."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.search.tables.contest import Played
from benchmarks.search.tables.contest_scores import group_figures, interval, oracle, over_groups, paired
from tests.autotune.measurements import sweep
from tests.benchmarks.search.grouped import gathered


def one(*shares: float, failed: tuple[bool, ...] = (), seconds: tuple[float, ...] = (9.0, 0.001)) -> Played:
    return Played(shares=shares, failed=failed, out_of_memory=failed, seconds=seconds)


def test_means_over_games() -> None:
    games = [one(0.5, 0.95, 1.0, failed=(True, False, False)), one(0.1, 0.1, 0.949, failed=(True, True, False))]
    found = group_figures(games, 5)
    assert found["share"] == pytest.approx({"1": 0.3, "3": 0.9745, "5": 0.9745})
    assert found["within_5_percent"] == {"1": 0.0, "3": 0.5, "5": 0.5}
    assert (found["failed_in_first_10"], found["oom_in_first_10"]) == (1.5, 1.5)
    assert (found["propose_ms_p95"], found["first_propose_ms"]) == (1.0, 9000.0)


def test_who_tried_nothing_has_nothing() -> None:
    found = group_figures([one(seconds=())], 3)
    assert found["share"] == {"1": 0.0, "3": 0.0}
    assert (found["propose_ms_p95"], found["first_propose_ms"]) == (None, None)


def test_only_the_first_ten_trials_count_as_wasted() -> None:
    assert group_figures([one(*[0.0] * 12, failed=(True,) * 12)], 12)["failed_in_first_10"] == 10


def test_intervals_are_over_groups() -> None:
    alike = [group_figures([one(0.0), one(1.0)], 1)] * 4  # seeds differ, groups do not
    found = over_groups(alike, [], 0)
    assert (found["share"], found["share_interval"]) == ({"1": 0.5}, {"1": [0.5, 0.5]})
    low, high = over_groups([group_figures([one(share)], 1) for share in (0.0, 1.0, 0.0, 1.0)], [], 0)["share_interval"]["1"]
    assert low < 0.5 < high
    assert interval(np.array([0.5]), 0) is None


def test_decisions_are_pooled() -> None:
    games = [one(1.0, seconds=(9.0, *[0.001] * 99)), one(1.0, seconds=(9.0, 0.1))]
    assert over_groups([], games, 0)["propose_ms_p95"] == pytest.approx(1.0)


def test_ahead_is_paired_by_group() -> None:
    ours, theirs = ([group_figures([one(share + more)], 1) for share in (0.1, 0.5, 0.8)] for more in (0.2, 0.0))
    found = paired(ours, theirs, 0)["1"]
    assert found["mean"] == pytest.approx(0.2)
    assert found["interval"] == pytest.approx([0.2, 0.2])


def test_an_oracle_without_noise_finds_the_best_at_once(tmp_path: Path) -> None:
    [group] = gathered(tmp_path, sweep(9)).groups
    found = oracle(group, 0.0, 5, draws=3, seed=0)
    assert found["share"] == found["within_5_percent"] == {"1": 1.0, "3": 1.0, "5": 1.0}
    noisy = oracle(group, 0.3, 5, draws=200, seed=0)["share"]
    assert 0.5 < noisy["1"] < noisy["3"] < noisy["5"] <= 1.0
