"""The loop over a table of measurements: order, budget, retries, refusals, confirmation, interruption."""

import dataclasses
import math
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import table

from autotune.best_config import build_best_config
from autotune.jobs.book import Book, read_book
from autotune.jobs.listener import LoopListener
from autotune.jobs.request import request_to_row
from autotune.jobs.session import Session
from autotune.jobs.stop import StopSignal
from autotune.loop import run_job
from autotune.strategies.strategy import Strategy
from autotune.verdict import decide
from executor.failures import failure_table
from executor.runners.replay import ReplayRunner
from search_spaces.failure import rows_from
from search_spaces.fewer import fewer_layers, fewer_micro_batches
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import Fidelity, TrialRequest, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import JobRecord, TrialRecord
from storage.store import Store

NAMES = ("random", "grid", "tpe")


def run(session: Session, store: Store, runner: ReplayRunner | None = None, **rest: Any) -> Book:
    job = store.create_job(request_to_row(session.request))
    run_job(session, store, job.id, runner or table.runner(), **rest)
    return read_book(store, job.id)


def searched(book: Book) -> list[TrialRecord]:
    return [trial for trial in book.trials if trial.purpose is Purpose.SEARCH]


def answers(*results: TrialResult) -> Callable[[TrialConfig], TrialResult]:
    """The first results in turn, then the table's."""
    left = list(results)
    return lambda config: left.pop(0) if left else table.measured(config)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_spends_its_budget_and_succeeds(tmp_path: Path, store: Store, name: str) -> None:
    book = run(table.session(tmp_path, strategy=name, trials=10), store)
    assert (book.job.state, book.job.reason) == (JobState.SUCCEEDED, "BUDGET")
    assert len(searched(book)) == 10 == sum(trial.counted for trial in book.trials)
    assert book.trials[0].config.zero_stage == 0
    assert book.open == []


@pytest.mark.parametrize("name", NAMES)
def test_a_space_that_is_used_up_ends_the_search(tmp_path: Path, store: Store, name: str) -> None:
    session = table.session(tmp_path, strategy=name, trials=500, confirm_repeats=0)
    book = run(session, store)
    assert (book.job.state, book.job.reason) == (JobState.SUCCEEDED, "EXHAUSTED")
    assert len(searched(book)) == session.space.count()


class Stuck(Strategy):
    """Proposes the first trial's configuration for ever."""

    def propose(self, candidates: Any, history: Any, pending: Any, count: int, seed: int) -> list[TrialConfig]:
        return [trial.config for trial in history[:1]]


def test_a_strategy_that_proposes_what_is_known_ends_the_search(tmp_path: Path, store: Store) -> None:
    session = dataclasses.replace(table.session(tmp_path, trials=10, confirm_repeats=0), strategy=Stuck())
    book = run(session, store)
    assert (book.job.state, book.job.reason) == (JobState.SUCCEEDED, "EXHAUSTED")
    assert [trial.number for trial in book.trials] == [0]


def test_several_attempts_run_at_once_without_a_trial_twice(tmp_path: Path, store: Store) -> None:
    runner = table.Recorded(slots=4, seconds_per_trial=0.02)
    book = run(table.session(tmp_path, trials=12), store, runner)
    assert len({trial.config.hash for trial in searched(book)}) == 12
    alone = table.session(tmp_path, trials=12)
    assert {t.config.hash for t in searched(book)} == {t.config.hash for t in searched(run(alone, store))}


def test_a_runner_without_room_at_the_moment_does_not_end_the_job(tmp_path: Path, store: Store) -> None:
    class Busy(ReplayRunner):
        def capacity(self) -> int:
            return 0

    book = run(table.session(tmp_path), store, Busy(table.measured))
    assert len(searched(book)) == 6


def test_later_trials_carry_the_reference_and_the_rate_to_beat(tmp_path: Path, store: Store) -> None:
    runner = table.Recorded()
    book = run(table.session(tmp_path), store, runner)
    assert book.job.reference_losses == (5.0, 4.5)
    assert runner.requests[0].reference_losses == ()
    assert all(request.reference_losses == (5.0, 4.5) for request in runner.requests[1:])
    assert runner.requests[0].rate_to_beat is None
    assert runner.requests[1].rate_to_beat == 100.0


def test_a_baseline_that_does_not_fit_is_tried_at_the_next_stage(tmp_path: Path, store: Store) -> None:
    book = run(table.session(tmp_path), store, table.runner(answers(*[table.ended(Outcome.INFEASIBLE)] * 2)))
    assert [trial.config.zero_stage for trial in book.trials[:3]] == [0, 1, 2]
    assert [trial.outcome for trial in book.trials[:3]] == [Outcome.INFEASIBLE, Outcome.INFEASIBLE, Outcome.OK]


def test_states_over_the_limit_are_refused_without_a_process(tmp_path: Path, store: Store) -> None:
    parameters = table.session(tmp_path).model.parameter_count
    session = table.session(tmp_path, memory_limit_bytes=parameters * 14, trials=50, strategy="grid")
    runner = table.Recorded(lambda config: table.ok(100.0, 1_000))
    book = run(session, store, runner)
    refused = [trial for trial in book.trials if trial.attempts == 0]
    assert {trial.config.zero_stage for trial in refused} == {0}
    assert all(
        t.outcome is Outcome.INFEASIBLE and not t.counted and t.result and t.result.rule == "states-fit" for t in refused
    )
    assert all(request.config.zero_stage > 0 for request in runner.requests)


@pytest.mark.parametrize(
    ("outcome", "attempts"),
    [(Outcome.FAILED, 1), (Outcome.WRONG, 1), (Outcome.TIMEOUT, 2), (Outcome.LOST, 4), (Outcome.INVALID, 1)],
)
def test_outcomes_are_retried_by_the_table(tmp_path: Path, store: Store, outcome: Outcome, attempts: int) -> None:
    book = run(table.session(tmp_path), store, table.runner(answers(*[table.ended(outcome)] * attempts)))
    assert (book.trials[0].outcome, book.trials[0].attempts) == (outcome, attempts)
    assert book.spent == 6


KILLED_FOR_MEMORY = dataclasses.replace(table.ended(Outcome.INFEASIBLE), cause="kernel-oom")


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
    book = run(table.session(tmp_path, trials=12, confirm_repeats=0), store, runner)
    (trial,) = [trial for trial in book.trials if trial.config.hash in victims]
    assert (trial.outcome, trial.attempts) == (outcome, 2)
    verified = [request for request in runner.requests if request.fresh_processes]
    assert [request.config.hash for request in verified] == victims
    assert beside[verified[0].attempt] == 0
    assert max(beside.values()) > 0


def test_a_users_row_decides_how_often_a_trial_is_retried(tmp_path: Path, store: Store) -> None:
    rows = rows_from({"killed": {"retries": 1}}, failure_table())
    killed = dataclasses.replace(table.ended(Outcome.LOST), cause="killed")
    runner = table.Recorded(answers(killed, killed))
    book = run(table.session(tmp_path, failures=rows, confirm_repeats=0), store, runner)
    assert (book.trials[0].outcome, book.trials[0].attempts) == (Outcome.LOST, 2)
    assert {request.failures for request in runner.requests} == {rows}


def test_the_winners_first_confirmation_has_fresh_processes(tmp_path: Path, store: Store) -> None:
    runner = table.Recorded()
    book = run(table.session(tmp_path, trials=24, confirm_repeats=3), store, runner)
    fresh = [number for number, request in enumerate(runner.requests) if request.fresh_processes]
    first = next(number for number, trial in enumerate(book.trials) if trial.purpose is Purpose.CONFIRM)
    assert fresh == [first]
    assert runner.requests[first].config.micro_batch_size == 4


def test_preemption_is_free_of_charge(tmp_path: Path, store: Store) -> None:
    results = [table.ended(Outcome.PREEMPTED)] * 5 + [table.ended(Outcome.TIMEOUT)]
    book = run(table.session(tmp_path), store, table.runner(answers(*results)))
    assert (book.trials[0].outcome, book.trials[0].attempts) == (Outcome.OK, 7)


def test_nothing_feasible_is_said(tmp_path: Path, store: Store) -> None:
    book = run(table.session(tmp_path), store, table.runner(lambda config: table.ended(Outcome.INFEASIBLE)))
    assert (book.job.state, book.job.reason) == (JobState.SUCCEEDED, "NOTHING_FEASIBLE")
    assert not any(trial.purpose is Purpose.CONFIRM for trial in book.trials)


def test_finalists_are_measured_again_interleaved_with_the_baseline(tmp_path: Path, store: Store) -> None:
    book = run(table.session(tmp_path, trials=24, confirm_repeats=3), store)
    confirmed = [trial for trial in book.trials if trial.purpose is Purpose.CONFIRM]
    rounds = [trial.repeat for trial in confirmed]
    assert rounds == sorted(rounds)
    assert set(Counter(rounds).values()) == {3}
    assert not any(trial.counted for trial in confirmed)
    assert confirmed[0].config.micro_batch_size == 4
    assert confirmed[2].config == book.trials[0].config


def test_finalists_far_apart_are_measured_once_more_only(tmp_path: Path, store: Store) -> None:
    def answer(config: TrialConfig) -> TrialResult:
        checkpointed = config.activation_checkpointing == "full"
        return table.ok(100.0 * 4**config.micro_batch_size if config.zero_stage == 1 and not checkpointed else 10.0)

    book = run(table.session(tmp_path, trials=24), store, table.runner(answer))
    assert {trial.repeat for trial in book.trials if trial.purpose is Purpose.CONFIRM} <= {1}


def test_no_confirmation_where_none_is_wanted(tmp_path: Path, store: Store) -> None:
    book = run(table.session(tmp_path, confirm_repeats=0), store)
    assert all(trial.purpose is Purpose.SEARCH for trial in book.trials)


def test_seconds_end_the_search_but_not_the_first_round(tmp_path: Path, store: Store) -> None:
    book = run(table.session(tmp_path, trials=24, max_seconds=0.4), store, table.runner(seconds_per_trial=0.05))
    assert book.job.reason == "BUDGET"
    assert 1 <= len(searched(book)) < 24
    assert "s are spent" in book.job.message


class StopAfter(LoopListener):
    """Wishes an end when a number of trials has ended, or right when the next has started."""

    def __init__(self, stop: StopSignal, trials: int, wishes: int = 1) -> None:
        self.stop, self.trials, self.wishes = stop, trials, wishes
        self.ended = 0

    def on_trial(self, trial: TrialRecord, book: Book) -> None:
        self.ended += 1
        if self.wishes == 1 and self.ended == self.trials:
            self.stop.request()

    def on_start(self, trial: TrialRecord) -> None:
        if self.wishes == 2 and self.ended == self.trials:
            self.stop.request()
            self.stop.request()


@pytest.mark.parametrize("wishes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_job_is_paused_and_goes_on(tmp_path: Path, store: Store, name: str, wishes: int) -> None:
    session = table.session(tmp_path, strategy=name, trials=10)
    unbroken = run(session, store)
    stop = StopSignal()
    book = run(session, store, stop=stop, listener=StopAfter(stop, 3, wishes))
    assert book.job.state is JobState.PAUSED
    assert len([trial for trial in book.trials if trial.outcome]) == 3
    run_job(session, store, book.job.id, table.runner())
    resumed = read_book(store, book.job.id)
    assert resumed.job.state is JobState.SUCCEEDED
    assert [(t.config, t.purpose, t.repeat) for t in resumed.trials] == [
        (t.config, t.purpose, t.repeat) for t in unbroken.trials
    ]


def test_an_error_of_the_runner_leaves_the_job_failed_and_resumable(tmp_path: Path, store: Store) -> None:
    class Broken(ReplayRunner):
        def submit(self, request: TrialRequest) -> str:
            raise RuntimeError("no room for the ranks")

    session = table.session(tmp_path)
    job = store.create_job(request_to_row(session.request))
    with pytest.raises(RuntimeError, match="no room"):
        run_job(session, store, job.id, Broken({}))
    assert (store.job(job.id).state, store.job(job.id).message) == (JobState.FAILED, "no room for the ranks")
    finished: JobRecord = run_job(session, store, job.id, table.runner())
    assert finished.state is JobState.SUCCEEDED


def test_a_keyboard_interrupt_leaves_the_job_paused(tmp_path: Path, store: Store) -> None:
    class Interrupted(LoopListener):
        def on_trial(self, trial: TrialRecord, book: Book) -> None:
            raise KeyboardInterrupt

    session = table.session(tmp_path)
    job = store.create_job(request_to_row(session.request))
    with pytest.raises(KeyboardInterrupt):
        run_job(session, store, job.id, table.runner(), listener=Interrupted())
    assert store.job(job.id).state is JobState.PAUSED


def test_no_thread_is_left(tmp_path: Path, store: Store) -> None:
    run(table.session(tmp_path), store)
    assert not [thread for thread in threading.enumerate() if thread.name == "lease-keeper"]


def test_a_job_whose_every_trial_fails_has_failed(tmp_path: Path, store: Store) -> None:
    book = run(table.session(tmp_path), store, table.runner(lambda config: table.ended(Outcome.FAILED)))
    assert (book.job.state, book.job.reason) == (JobState.FAILED, "EVERY_TRIAL_FAILED")
    assert "FAILED" in book.job.message


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


def test_search_trials_race_and_those_that_decide_never_do(tmp_path: Path, store: Store) -> None:
    runner = Racing()
    session = table.session(tmp_path, trials=24, confirm_repeats=2)
    book = run(session, store, runner)
    by_number = dict(zip([trial.number for trial in book.trials], runner.requests, strict=True))
    for trial in book.trials:
        decides = trial.number == 0 or trial.purpose is not Purpose.SEARCH
        assert (by_number[trial.number].rate_to_beat is None) == decides
    pruned = [trial for trial in book.trials if trial.outcome is Outcome.PRUNED]
    assert pruned
    assert all(trial.counted and trial.attempts == 1 and trial.purpose is Purpose.SEARCH for trial in pruned)
    for trial in pruned:
        held = by_number[trial.number]
        result = book.whole(trial).result
        assert result is not None
        assert result.samples_per_second is not None
        assert held.rate_to_beat is not None
        # The bound is stored as it was told, not widened once more.
        assert result.samples_per_second.high == pytest.approx(result.samples_per_second.mean * 1.1)
        assert result.samples_per_second.high < held.rate_to_beat
        assert held.race_spread >= math.sqrt(2) * 0.8 * table.session(tmp_path).prior.relative


def test_racing_changes_neither_the_winner_nor_what_is_tried_by_a_fixed_order(tmp_path: Path, store: Store) -> None:
    def found(**changes: Any) -> tuple[list[str], str]:
        session = table.session(tmp_path, trials=24, strategy="grid", confirm_repeats=1, **changes)
        book = run(session, store, Racing())
        verdict = decide(book, session.ranking, session.prior, session.baselines)
        assert verdict is not None
        return [trial.config_hash for trial in searched(book)], verdict.best.config_hash

    assert found(racing=True) == found(racing=False)


@pytest.mark.parametrize("changes", [{"racing": False}, {"objective": "memory"}])
def test_no_trial_races_where_that_is_not_wanted_or_the_slower_may_win(
    tmp_path: Path, store: Store, changes: dict[str, Any]
) -> None:
    runner = table.Recorded()
    run(table.session(tmp_path, **changes), store, runner)
    assert all(request.rate_to_beat is None for request in runner.requests)


def test_pruned_trials_are_no_alternatives_and_no_repeats(tmp_path: Path, store: Store) -> None:
    session = table.session(tmp_path, trials=24, confirm_repeats=0)
    book = run(session, store, Racing())
    pruned = {trial.number for trial in book.trials if trial.outcome is Outcome.PRUNED}
    document = build_best_config(session, book)
    assert pruned
    assert not pruned & {entry["trial"] for entry in document["alternatives"]}
    assert all(book.repeats(book.trial(number).config) == [] for number in pruned)


class Fewer(table.Recorded):
    """Answers as the ranks would where steps may have fewer micro-batches, a tenth too fast."""

    def _answer(self, request: TrialRequest) -> TrialResult:
        result = super()._answer(request)
        most = request.fidelity.most_micro_batches
        if fewer_micro_batches(request.config, request.workload, request.world_size, most) is None:
            return result
        assert result.samples_per_second is not None
        rate = table.ok(result.samples_per_second.mean * 1.1).samples_per_second
        return dataclasses.replace(result, samples_per_second=rate, extrapolated=("micro_batches",))


@pytest.mark.parametrize("rounds", [0, 2])
def test_the_winner_rests_on_full_steps(tmp_path: Path, store: Store, rounds: int) -> None:
    """Of small micro-batches, which a step has more than the most of, some are fastest here."""
    runner = Fewer(lambda config: table.ok(100.0 / config.micro_batch_size * (1 + 0.05 * config.zero_stage)))
    session = table.session(
        tmp_path, trials=24, global_batch_size=16, confirm_repeats=rounds, fidelity=Fidelity(most_micro_batches=4)
    )
    book = run(session, store, runner)
    requests = dict(zip([trial.number for trial in book.trials], runner.requests, strict=True))
    assert requests[0].fidelity.most_micro_batches is None
    confirmations = [trial for trial in book.trials if trial.purpose is Purpose.CONFIRM]
    assert {requests[trial.number].fidelity.most_micro_batches for trial in confirmations} == {None}
    assert all(trial.result is not None and not trial.result.extrapolated for trial in confirmations)
    assert len(confirmations) == (1 if rounds == 0 else len(confirmations))
    for trial in searched(book):
        reduced = trial.result is not None and bool(trial.result.extrapolated)
        assert trial.fidelity == ("fewer_micro_batches" if reduced else "full")
    verdict = decide(book, session.ranking, session.prior, session.baselines)
    assert verdict is not None
    assert verdict.best.result is not None
    assert verdict.best.result.extrapolated == ("micro_batches",)
    assert book.confirmed(verdict.best.config)
    measured = build_best_config(session, book)["best"]["measured"]
    assert measured["extrapolated"] == []
    assert measured["samples_per_second"]["mean"] == pytest.approx(115.0)


class Shallower(table.Recorded):
    """Answers as the ranks would of models of fewer layers: a tenth too fast, and with too small a peak."""

    def _answer(self, request: TrialRequest) -> TrialResult:
        result = super()._answer(request)
        if fewer_layers(request.config, request.model, request.fidelity.most_layers) is None:
            return result
        assert result.samples_per_second is not None
        less = table.ok(result.samples_per_second.mean * 1.1, 900_000, attempt=request.attempt)
        return dataclasses.replace(less, losses=(), extrapolated=("layers",))


@pytest.mark.parametrize("rounds", [0, 2])
def test_the_winner_and_its_memory_rest_on_the_whole_model(tmp_path: Path, store: Store, rounds: int) -> None:
    runner = Shallower(lambda config: table.ok(100.0 * (1 + 0.1 * config.micro_batch_size), 1_000_000))
    model = {"model": "llama-mini", "fidelity": Fidelity(most_layers=3)}
    session = table.session(tmp_path, trials=8, confirm_repeats=rounds, pins={"zero_stage": [1, 2]}, **model)
    book = run(session, store, runner)
    requests = dict(zip([trial.number for trial in book.trials], runner.requests, strict=True))
    assert requests[0].fidelity.most_layers is None
    for trial in book.trials[1:]:
        shallow = trial.purpose is Purpose.SEARCH
        assert (trial.fidelity == "fewer_layers") == shallow
        assert requests[trial.number].fidelity.most_layers == (3 if shallow else None)
        assert not shallow or requests[trial.number].rate_to_beat is None
    assert book.job.reference_losses == (5.0, 4.5)
    best = build_best_config(session, book)["best"]["measured"]
    assert best["extrapolated"] == []
    assert {rank["total"] for rank in best["peak_memory_bytes"]} == {1_000_000}


def test_what_could_not_be_confirmed_in_full_does_not_win(tmp_path: Path, store: Store) -> None:
    class Unconfirmed(Fewer):
        def _answer(self, request: TrialRequest) -> TrialResult:
            result = super()._answer(request)
            asked = request.rate_to_beat is None and len(self.requests) > 1
            return dataclasses.replace(table.ended(Outcome.FAILED), attempt=request.attempt) if asked else result

    def answer(config: TrialConfig) -> TrialResult:
        return table.ok(100.0 / config.micro_batch_size * (1 + 0.05 * config.zero_stage))

    session = table.session(
        tmp_path, trials=6, global_batch_size=16, confirm_repeats=0, fidelity=Fidelity(most_micro_batches=4)
    )
    book = run(session, store, Unconfirmed(answer))
    verdict = decide(book, session.ranking, session.prior, session.baselines)
    assert verdict is not None
    assert verdict.best.result is not None
    assert verdict.best.result.extrapolated == ()
