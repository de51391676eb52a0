"""What becomes of a trial that did not end well: retried, verified alone, or its outcome stays."""

import dataclasses
from pathlib import Path

import pytest
import table
from played import run

from executor.errors import failure_table
from search_spaces.failure import rows_from
from search_spaces.outcome import Outcome
from search_spaces.trial import TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store

KILLED_FOR_MEMORY = dataclasses.replace(table.ended(Outcome.INFEASIBLE), cause="kernel-oom")


@pytest.mark.prove
@pytest.mark.parametrize(
    ("outcome", "attempts"),
    [(Outcome.FAILED, 1), (Outcome.WRONG, 1), (Outcome.TIMEOUT, 2), (Outcome.LOST, 4), (Outcome.INVALID, 1)],
)
def test_outcomes_are_retried_by_the_table(tmp_path: Path, store: Store, outcome: Outcome, attempts: int) -> None:
    snapshot = run(table.session(tmp_path), store, table.runner(table.answers(*[table.ended(outcome)] * attempts)))
    assert (snapshot.trials[0].outcome, snapshot.trials[0].attempts) == (outcome, attempts)
    assert snapshot.spent == 6


@pytest.mark.prove
@pytest.mark.parametrize(("again", "outcome"), [(True, Outcome.INFEASIBLE), (False, Outcome.OK)])
def test_what_may_be_a_neighbours_fault_is_verified_alone(tmp_path: Path, store: Store, again: bool, outcome: Outcome) -> None:
    victims: list[str] = []

    def answer(config: TrialConfig) -> TrialResult:
        victims.extend([config.hash] if not victims and config.micro_batch_size > 1 else [])
        asked = [request.config.hash for request in runner.requests]
        killed = config.hash in victims and (again or asked.count(config.hash) == 1)
        return KILLED_FOR_MEMORY if killed else table.measured(config)

    beside: dict[str, int] = {}

    class Slots(table.Recorded):
        def submit(self, request: TrialRequest) -> str:
            beside[request.attempt] = len(self._running) + len(self._waiting)
            for attempt in self._running:
                beside[attempt] += 1
            return super().submit(request)

    runner = Slots(answer, slots=3, seconds_per_trial=0.02)
    snapshot = run(table.session(tmp_path, trials=12, confirm_repeats=0), store, runner)
    (trial,) = [trial for trial in snapshot.trials if trial.config.hash in victims]
    assert (trial.outcome, trial.attempts) == (outcome, 2)
    verified = [request for request in runner.requests if request.fresh_processes]
    assert [request.config.hash for request in verified] == victims
    assert beside[verified[0].attempt] == 0
    assert max(beside.values()) > 0


def test_a_users_row_decides_how_often_a_trial_is_retried(tmp_path: Path, store: Store) -> None:
    rows = rows_from({"killed": {"retries": 1}}, failure_table())
    killed = dataclasses.replace(table.ended(Outcome.LOST), cause="killed")
    runner = table.Recorded(table.answers(killed, killed))
    snapshot = run(table.session(tmp_path, failures=rows, confirm_repeats=0), store, runner)
    assert (snapshot.trials[0].outcome, snapshot.trials[0].attempts) == (Outcome.LOST, 2)
    assert {request.failures for request in runner.requests} == {rows}


def test_preemption_is_free_of_charge(tmp_path: Path, store: Store) -> None:
    results = [table.ended(Outcome.PREEMPTED)] * 5 + [table.ended(Outcome.TIMEOUT)]
    snapshot = run(table.session(tmp_path), store, table.runner(table.answers(*results)))
    assert (snapshot.trials[0].outcome, snapshot.trials[0].attempts) == (Outcome.OK, 7)
