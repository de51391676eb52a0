"""Objective pareto: weights take turns, the front is wider, the winner is the fastest; one figure tells the front."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import table
from played import run

from autotune.objective.ranking import Ranking, front_over_baseline, front_points, hypervolume
from autotune.outcome.best_config import build_best_config
from autotune.request.job_fields import Objective
from autotune.strategies import SHARES, FrontStrategy
from autotune.strategies.strategy import Candidates, Strategy
from executor.runners.replay import ReplayRunner
from search_spaces.trial import RankMeasurement, TrialRequest
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord
from storage.store import Store


class Labelled(Strategy):
    """Proposes the next candidate, and says at which share it was asked."""

    def __init__(self, share: float, asked: list[float]) -> None:
        self._share, self._asked = share, asked

    def propose(
        self, candidates: Candidates, history: Sequence[TrialRecord], pending: Sequence[TrialConfig], count: int, seed: int
    ) -> list[TrialConfig]:
        self._asked.append(self._share)
        known = {config.hash for config in pending}
        return [config for config in candidates.enumerate() if config.hash not in known][:count]


def test_each_share_has_its_turn_whether_asked_one_by_one_or_at_once(tmp_path: Path) -> None:
    asked: list[float] = []
    strategy = FrontStrategy(lambda share: Labelled(share, asked))
    space = table.session(tmp_path).space
    together = strategy.propose(space, (), (), 6, 0)
    assert asked == [*SHARES, SHARES[0]]
    alone: list[TrialConfig] = []
    for _ in range(6):
        alone += strategy.propose(space, (), alone, 1, 0)
    assert asked == [*SHARES, SHARES[0]] * 2
    assert alone == together
    assert len({config.hash for config in together}) == 6


@pytest.mark.nightly
def test_the_front_is_wider_than_that_of_a_search_for_the_fastest(tmp_path: Path, store: Store) -> None:
    shares: dict[str, float] = {}
    for objective in ("throughput", "pareto"):
        session = table.session(tmp_path, strategy="guided", trials=14, objective=objective)
        document = build_best_config(session, run(session, store))
        shares[objective] = front_over_baseline(document) or 0.0
        points = front_points(document)
        assert points == sorted(points, reverse=True)
        assert document["best"]["measured"]["samples_per_second"]["mean"] == pytest.approx(points[0][0])
    assert shares["pareto"] > 1.05 * shares["throughput"] > 1.05


@pytest.mark.prove
def test_the_winner_is_the_fastest_within_the_headroom(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trials=24, objective="pareto", memory_limit=7_000_000, headroom=0.1)
    document = build_best_config(session, run(session, store))
    assert document["best"]["config"]["micro_batch_size"] == 4
    assert document["baseline"]["gain"]["of"] == "samples_per_second"
    assert all(peak <= 6_300_000 for _, peak in front_points(document))


@pytest.mark.prove
def test_no_trial_races(tmp_path: Path, store: Store) -> None:
    class Recorded(ReplayRunner):
        def __init__(self, answer: Any) -> None:
            super().__init__(answer)
            self.requests: list[TrialRequest] = []

        def submit(self, request: TrialRequest) -> str:
            self.requests.append(request)
            return super().submit(request)

    told = {}
    for objective in ("throughput", "pareto"):
        runner = Recorded(table.measured)
        run(table.session(tmp_path, objective=objective), store, runner)
        told[objective] = any(request.rate_to_beat is not None for request in runner.requests)
    assert told == {"throughput": True, "pareto": False}


@pytest.mark.prove
def test_scores_at_the_ends_order_as_the_objectives_alone(tmp_path: Path, store: Store) -> None:
    trials = run(table.session(tmp_path, trials=24), store).searched
    for share, alone in ((0.0, Objective.THROUGHPUT), (1.0, Objective.MEMORY)):
        weighted = Ranking(objective=Objective.PARETO, memory_share=share)
        scores = [weighted.score(trial) or 0.0 for trial in trials]
        others = [Ranking(objective=alone).score(trial) or 0.0 for trial in trials]
        assert sorted(range(len(trials)), key=scores.__getitem__) == sorted(range(len(trials)), key=others.__getitem__)


def test_what_is_outside_of_the_allocator_counts_against_the_limit(tmp_path: Path, store: Store) -> None:
    trial = run(table.session(tmp_path, trials=4), store).searched[0]
    rank = RankMeasurement(
        rank=0, host="a", peak_memory_bytes=1000, memory_by_tag={}, tag_peak_bytes={}, rss_peak_bytes=0,
        cpu_seconds_per_step=0.0, collectives=(), non_torch_bytes=300,
    )  # fmt: skip
    assert trial.result is not None
    measured = dataclasses.replace(trial, result=dataclasses.replace(trial.result, peak_memory_bytes=1000, ranks=(rank,)))
    assert [Ranking(memory_limit_bytes=limit).may_win(measured) for limit in (1300, 1299)] == [True, False]


def test_a_strip_of_memory_counts_once() -> None:
    assert hypervolume([(10.0, 4.0), (6.0, 2.0), (5.0, 3.0), (1.0, 9.0)], 8.0) == pytest.approx(10 * 4 + 6 * 2)
    assert hypervolume([], 8.0) == 0.0
