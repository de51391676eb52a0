"""Finalists are measured again before one of them wins."""

from collections import Counter
from pathlib import Path

import pytest
import table
from played import run

from search_spaces.outcome import Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store


@pytest.mark.prove
def test_the_winners_first_confirmation_has_fresh_processes(tmp_path: Path, store: Store) -> None:
    runner = table.Recorded()
    snapshot = run(table.session(tmp_path, trials=24, confirm_repeats=3), store, runner)
    fresh = [number for number, request in enumerate(runner.requests) if request.fresh_processes]
    first = next(number for number, trial in enumerate(snapshot.trials) if trial.purpose is Purpose.CONFIRM)
    assert fresh == [first]
    assert runner.requests[first].config.micro_batch_size == 4


@pytest.mark.prove
def test_finalists_are_measured_again_interleaved_with_the_baseline(tmp_path: Path, store: Store) -> None:
    snapshot = run(table.session(tmp_path, trials=24, confirm_repeats=3), store)
    confirmed = [trial for trial in snapshot.trials if trial.purpose is Purpose.CONFIRM]
    rounds = [trial.repeat for trial in confirmed]
    assert rounds == sorted(rounds)
    assert set(Counter(rounds).values()) == {3}
    assert not any(trial.counted for trial in confirmed)
    assert confirmed[0].config.micro_batch_size == 4
    assert confirmed[2].config == snapshot.trials[0].config


@pytest.mark.prove
def test_finalists_far_apart_are_measured_once_more_only(tmp_path: Path, store: Store) -> None:
    def answer(config: TrialConfig) -> TrialResult:
        checkpointed = config.activation_checkpointing == "full"
        return table.ok(100.0 * 4**config.micro_batch_size if config.zero_stage == 1 and not checkpointed else 10.0)

    snapshot = run(table.session(tmp_path, trials=24), store, table.runner(answer))
    assert {trial.repeat for trial in snapshot.trials if trial.purpose is Purpose.CONFIRM} <= {1}


def test_no_confirmation_where_none_is_wanted(tmp_path: Path, store: Store) -> None:
    snapshot = run(table.session(tmp_path, confirm_repeats=0), store)
    assert all(trial.purpose is Purpose.SEARCH for trial in snapshot.trials)
