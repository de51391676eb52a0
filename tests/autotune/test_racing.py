"""Search trials that end as soon as they cannot be the best."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import table
from played import run, searched

from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import repeat_of
from autotune.outcome.verdict import decide
from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import TrialRequest, TrialResult
from storage.store import Store


class Racing(table.Recorded):
    """Ends a trial as the ranks would: PRUNED where its rate is far below the one to beat."""

    def _answer(self, request: TrialRequest) -> TrialResult:
        result = super()._answer(request)
        assert result.samples_per_second is not None
        bound = result.samples_per_second.mean * 1.1
        if request.rate_to_beat is None or bound >= request.rate_to_beat:
            return result
        rate = dataclasses.replace(result.samples_per_second, high=bound)
        return dataclasses.replace(result, outcome=Outcome.PRUNED, samples_per_second=rate, message="at most that")


@pytest.mark.prove
def test_search_trials_race_and_those_that_decide_never_do(tmp_path: Path, store: Store) -> None:
    runner = Racing()
    session = table.session(tmp_path, trials=24, confirm_repeats=2)
    snapshot = run(session, store, runner)
    by_number = dict(zip([trial.number for trial in snapshot.trials], runner.requests, strict=True))
    for trial in snapshot.trials:
        decides = trial.number == 0 or trial.purpose is not Purpose.SEARCH
        assert (by_number[trial.number].rate_to_beat is None) == decides
    pruned = [trial for trial in snapshot.trials if trial.outcome is Outcome.PRUNED]
    assert pruned
    assert all(trial.counted and trial.attempts == 1 and trial.purpose is Purpose.SEARCH for trial in pruned)
    for trial in pruned:
        held = by_number[trial.number]
        result = snapshot.whole(trial).result
        assert result is not None
        assert result.samples_per_second is not None
        assert held.rate_to_beat is not None
        # The bound is stored as it was told, not widened once more.
        assert result.samples_per_second.high == pytest.approx(result.samples_per_second.mean * 1.1)
        assert result.samples_per_second.high < held.rate_to_beat
        assert held.race_spread >= math.sqrt(2) * 0.8 * table.session(tmp_path).prior.relative


@pytest.mark.prove
def test_racing_changes_neither_the_winner_nor_what_is_tried_by_a_fixed_order(tmp_path: Path, store: Store) -> None:
    def found(**changes: Any) -> tuple[list[str], str]:
        session = table.session(tmp_path, trials=24, strategy="grid", confirm_repeats=1, **changes)
        snapshot = run(session, store, Racing())
        verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
        assert verdict is not None
        return [trial.config_hash for trial in searched(snapshot)], verdict.best.config_hash

    assert found(racing=True) == found(racing=False)


@pytest.mark.prove
@pytest.mark.parametrize("changes", [{"racing": False}, {"objective": "memory"}])
def test_no_trial_races_where_that_is_not_wanted_or_the_slower_may_win(
    tmp_path: Path, store: Store, changes: dict[str, Any]
) -> None:
    runner = table.Recorded()
    run(table.session(tmp_path, **changes), store, runner)
    assert all(request.rate_to_beat is None for request in runner.requests)


def test_pruned_trials_are_no_alternatives_and_no_repeats(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trials=24, confirm_repeats=0)
    snapshot = run(session, store, Racing())
    pruned = {trial.number for trial in snapshot.trials if trial.outcome is Outcome.PRUNED}
    document = build_best_config(session, snapshot)
    assert pruned
    assert not pruned & {entry["trial"] for entry in document["alternatives"]}
    assert all(repeat_of(snapshot.trial(number).result) is None for number in pruned)
