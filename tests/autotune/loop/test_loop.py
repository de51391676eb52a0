"""The loop over a table of measurements: order, budget, refusals, and how the search ends."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import table
from played import run, searched

from autotune.strategies.strategy import Strategy
from executor.runners.replay import ReplayRunner
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial_config import TrialConfig
from storage.store import Store

NAMES = ("random", "grid", "tpe")


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_a_job_spends_its_budget_and_succeeds(tmp_path: Path, store: Store, name: str) -> None:
    snapshot = run(table.session(tmp_path, strategy=name, trials=10), store)
    assert (snapshot.job.state, snapshot.job.reason) == (JobState.SUCCEEDED, "BUDGET")
    assert len(searched(snapshot)) == 10 == sum(trial.counted for trial in snapshot.trials)
    assert snapshot.trials[0].config.zero_stage == 0
    assert snapshot.open == []


@pytest.mark.prove
@pytest.mark.parametrize("name", NAMES)
def test_a_space_that_is_used_up_ends_the_search(tmp_path: Path, store: Store, name: str) -> None:
    session = table.session(tmp_path, strategy=name, trials=500, confirm_repeats=0)
    snapshot = run(session, store)
    assert (snapshot.job.state, snapshot.job.reason) == (JobState.SUCCEEDED, "EXHAUSTED")
    assert len(searched(snapshot)) == session.space.count()


class Stuck(Strategy):
    """Proposes the first trial's configuration for ever."""

    def propose(self, candidates: Any, history: Any, pending: Any, count: int, seed: int) -> list[TrialConfig]:
        return [trial.config for trial in history[:1]]


def test_a_strategy_that_proposes_what_is_known_ends_the_search(tmp_path: Path, store: Store) -> None:
    session = dataclasses.replace(table.session(tmp_path, trials=10, confirm_repeats=0), strategy=Stuck())
    snapshot = run(session, store)
    assert (snapshot.job.state, snapshot.job.reason) == (JobState.SUCCEEDED, "EXHAUSTED")
    assert [trial.number for trial in snapshot.trials] == [0]


@pytest.mark.prove
def test_several_attempts_run_at_once_without_a_trial_twice(tmp_path: Path, store: Store) -> None:
    runner = table.Recorded(slots=4, seconds_per_trial=0.02)
    snapshot = run(table.session(tmp_path, trials=12), store, runner)
    assert len({trial.config.hash for trial in searched(snapshot)}) == 12
    alone = table.session(tmp_path, trials=12)
    assert {t.config.hash for t in searched(snapshot)} == {t.config.hash for t in searched(run(alone, store))}


def test_a_runner_without_room_at_the_moment_does_not_end_the_job(tmp_path: Path, store: Store) -> None:
    class Busy(ReplayRunner):
        def capacity(self) -> int:
            return 0

    snapshot = run(table.session(tmp_path), store, Busy(table.measured))
    assert len(searched(snapshot)) == 6


def test_later_trials_carry_the_reference_and_the_rate_to_beat(tmp_path: Path, store: Store) -> None:
    runner = table.Recorded()
    snapshot = run(table.session(tmp_path), store, runner)
    assert snapshot.job.reference_losses == {"": (5.0, 4.5)}
    assert runner.requests[0].reference_losses == ()
    assert all(request.reference_losses == (5.0, 4.5) for request in runner.requests[1:])
    assert runner.requests[0].rate_to_beat is None
    assert runner.requests[1].rate_to_beat == 100.0


def test_a_baseline_that_does_not_fit_is_tried_at_the_next_stage(tmp_path: Path, store: Store) -> None:
    snapshot = run(table.session(tmp_path), store, table.runner(table.answers(*[table.ended(Outcome.INFEASIBLE)] * 2)))
    assert [trial.config.zero_stage for trial in snapshot.trials[:3]] == [0, 1, 2]
    assert [trial.outcome for trial in snapshot.trials[:3]] == [Outcome.INFEASIBLE, Outcome.INFEASIBLE, Outcome.OK]


@pytest.mark.prove
def test_states_over_the_limit_are_refused_without_a_process(tmp_path: Path, store: Store) -> None:
    parameters = table.session(tmp_path).model.parameter_count
    session = table.session(tmp_path, memory_limit=parameters * 14, trials=50, strategy="grid")
    runner = table.Recorded(lambda config: table.ok(100.0, 1_000))
    snapshot = run(session, store, runner)
    refused = [trial for trial in snapshot.trials if trial.attempts == 0]
    assert {trial.config.zero_stage for trial in refused} == {0}
    assert all(
        t.outcome is Outcome.INFEASIBLE and not t.counted and t.result and t.result.rule == "states-fit" for t in refused
    )
    assert all(request.config.zero_stage > 0 for request in runner.requests)


def test_nothing_feasible_is_said(tmp_path: Path, store: Store) -> None:
    snapshot = run(table.session(tmp_path), store, table.runner(lambda config: table.ended(Outcome.INFEASIBLE)))
    assert (snapshot.job.state, snapshot.job.reason) == (JobState.SUCCEEDED, "NOTHING_FEASIBLE")
    assert snapshot.job.message.startswith("no configuration fits after ")
    assert not any(trial.purpose is Purpose.CONFIRM for trial in snapshot.trials)


def test_seconds_end_the_search_but_not_the_first_round(tmp_path: Path, store: Store) -> None:
    snapshot = run(table.session(tmp_path, trials=24, max_seconds=0.4), store, table.runner(seconds_per_trial=0.05))
    assert snapshot.job.reason == "BUDGET"
    assert 1 <= len(searched(snapshot)) < 24
    assert "s are spent" in snapshot.job.message


def test_no_thread_is_left(tmp_path: Path, store: Store) -> None:
    run(table.session(tmp_path), store)
    assert not [thread for thread in threading.enumerate() if thread.name == "lease-heartbeat"]


def test_a_job_whose_every_trial_fails_has_failed(tmp_path: Path, store: Store) -> None:
    snapshot = run(table.session(tmp_path), store, table.runner(lambda config: table.ended(Outcome.FAILED)))
    assert (snapshot.job.state, snapshot.job.reason) == (JobState.FAILED, "EVERY_TRIAL_FAILED")
    assert "FAILED" in snapshot.job.message
