"""Trials, their attempts, and where these run: on every backend."""

import dataclasses

import pytest

from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.errors import UnknownTrialError
from storage.leases import current_owner
from storage.records import AttemptState, Lease
from storage.store import Store
from tests.storage.job_steps import RANK, attempt, kinds


class TestTrials:
    def test_a_trial_is_unique_by_config_purpose_fidelity_and_repeat(self, store: Store, lease: Lease) -> None:
        config = TrialConfig(zero_stage=2)
        first = store.trials.add(lease, config, Purpose.SEARCH)
        others = [
            store.trials.add(lease, TrialConfig(), Purpose.SEARCH),
            store.trials.add(lease, config, Purpose.CONFIRM),
            store.trials.add(lease, config, Purpose.SEARCH, fidelity="short"),
            store.trials.add(lease, config, Purpose.SEARCH, repeat=1),
        ]

        assert [first.number, *(trial.number for trial in others)] == [0, 1, 2, 3, 4]
        events = len(store.events.of(lease.job_id))
        assert store.trials.add(lease, config, Purpose.SEARCH) == first
        assert len(store.events.of(lease.job_id)) == events
        assert store.trials.of(lease.job_id) == [first, *others]

    def test_two_jobs_may_want_the_same(self, store: Store, lease: Lease) -> None:
        other = store.jobs.acquire(store.jobs.create({}).id, current_owner())

        assert store.trials.add(lease, TrialConfig(), Purpose.SEARCH).number == 0
        assert store.trials.add(other, TrialConfig(), Purpose.SEARCH).number == 0

    def test_a_refused_candidate_has_a_result_and_costs_nothing(self, store: Store, lease: Lease) -> None:
        refusal = TrialResult(attempt="", outcome=Outcome.INVALID, rule="divides", message="8 does not divide 12")
        trial = store.trials.add(lease, TrialConfig(), Purpose.SEARCH, refusal=refusal)

        assert (trial.outcome, trial.result, trial.counted, trial.attempts) == (Outcome.INVALID, refusal, False, 0)
        assert trial.finished is not None
        assert store.trials.of(lease.job_id) == [trial]
        assert kinds(store, lease.job_id)[-1] == "trial_refused"
        with pytest.raises(UnknownTrialError):
            store.attempts.start(lease, trial.number)

    def test_a_wanted_trial_can_be_refused_until_it_is_attempted(self, store: Store, lease: Lease) -> None:
        refusal = TrialResult(attempt="", outcome=Outcome.INFEASIBLE)
        store.trials.add(lease, TrialConfig(), Purpose.SEARCH)
        assert store.trials.add(lease, TrialConfig(), Purpose.SEARCH, refusal=refusal).outcome is Outcome.INFEASIBLE
        attempt(store, lease, TrialConfig(zero_stage=1))
        assert store.trials.add(lease, TrialConfig(zero_stage=1), Purpose.SEARCH, refusal=refusal).outcome is None

    def test_only_search_trials_that_started_are_counted(self, store: Store, lease: Lease) -> None:
        for purpose in Purpose:
            attempt(store, lease, purpose=purpose)
        store.trials.add(lease, TrialConfig(zero_stage=1), Purpose.SEARCH)

        assert [trial.counted for trial in store.trials.of(lease.job_id)] == [True, False, False, False, False]

    def test_the_first_reference_losses_stay(self, store: Store, lease: Lease) -> None:
        store.jobs.set_reference_losses(lease, ())
        store.jobs.set_reference_losses(lease, (2.5, 2.25))
        store.jobs.set_reference_losses(lease, (9.0,))

        assert store.jobs.get(lease.job_id).reference_losses == (2.5, 2.25)
        assert kinds(store, lease.job_id).count("reference_set") == 1


class TestAttempts:
    def test_an_accepted_result_is_the_trials(self, store: Store, lease: Lease, clock) -> None:
        clock.advance(1)
        token = attempt(store, lease)
        clock.advance(7)
        result = TrialResult(
            attempt=token,
            outcome=Outcome.OK,
            samples_per_second=Interval(mean=10.0, low=9.5, high=10.5),
            peak_memory_bytes=2**41,
            losses=(3.5, float("inf"), 1e-300),
            ranks=(RANK, dataclasses.replace(RANK, rank=1)),
            environment={"torch": "2.x", "path": "nul \0 and half a pair \udcff"},
        )

        assert store.attempts.finish(lease, result)
        trial = store.trials.of(lease.job_id)[0]
        assert (trial.outcome, trial.result, trial.attempts) == (Outcome.OK, result, 1)
        assert trial.started is not None
        assert trial.finished is not None
        assert (trial.finished - trial.started).total_seconds() == 7
        [record] = store.attempts.of(lease.job_id, 0)
        assert (record.state, record.number, record.result) == (AttemptState.ACCEPTED, 1, result)
        assert store.events.of(lease.job_id)[-1].payload["outcome"] == "OK"

    def test_a_retried_trial_stays_wanted(self, store: Store, lease: Lease) -> None:
        lost = TrialResult(attempt=attempt(store, lease), outcome=Outcome.LOST)

        assert store.attempts.finish(lease, lost, retry=True)
        assert store.trials.of(lease.job_id)[0].outcome is None
        assert store.attempts.finish(lease, TrialResult(attempt=store.attempts.start(lease, 0).token, outcome=Outcome.OK))
        assert [a.state for a in store.attempts.of(lease.job_id)] == [AttemptState.RETRIED, AttemptState.ACCEPTED]
        assert (store.trials.of(lease.job_id)[0].attempts, store.trials.of(lease.job_id)[0].counted) == (2, True)

    def test_a_late_result_is_kept_and_never_counted(self, store: Store, lease: Lease) -> None:
        late = attempt(store, lease)
        current = store.attempts.start(lease, 0).token

        assert not store.attempts.finish(lease, TrialResult(attempt=late, outcome=Outcome.FAILED, message="late"))
        assert store.trials.of(lease.job_id)[0].outcome is None
        assert store.attempts.finish(lease, TrialResult(attempt=current, outcome=Outcome.OK))
        assert store.trials.of(lease.job_id)[0].outcome is Outcome.OK
        kept = store.attempts.of(lease.job_id)[0]
        assert kept.result is not None
        assert (kept.state, kept.result.message) == (AttemptState.SUPERSEDED, "late")

    def test_a_result_given_twice_counts_once(self, store: Store, lease: Lease) -> None:
        result = TrialResult(attempt=attempt(store, lease), outcome=Outcome.OK, message="first")
        assert store.attempts.finish(lease, result)
        before = store.events.of(lease.job_id)

        assert store.attempts.finish(lease, dataclasses.replace(result, message="second"))
        assert store.events.of(lease.job_id) == before
        assert store.trials.of(lease.job_id)[0].result == result

    def test_what_is_not_there_is_refused(self, store: Store, lease: Lease) -> None:
        other = store.jobs.acquire(store.jobs.create({}).id, current_owner())
        token = attempt(store, other)

        with pytest.raises(UnknownTrialError):
            store.attempts.start(lease, 0)
        for name in (token, "nothing"):
            with pytest.raises(UnknownTrialError):
                store.attempts.finish(lease, TrialResult(attempt=name, outcome=Outcome.OK))


class TestPlacements:
    def test_since_when_and_where_trials_run(self, store: Store, lease: Lease, clock) -> None:
        named = dataclasses.replace(RANK, node="node-3")
        attempt(store, lease)
        began = store.attempts.of(lease.job_id, 0)[0].started
        clock.advance(5)
        for stage, told in enumerate(
            ({"ranks": (RANK,)}, {"ranks": (named, dataclasses.replace(RANK, rank=1))}, {"ranks": (RANK,), "node": "lost"}), 1
        ):
            token = attempt(store, lease, TrialConfig(zero_stage=stage))
            store.attempts.finish(lease, TrialResult(attempt=token, outcome=Outcome.OK, **told))
        store.trials.add(lease, TrialConfig(micro_batch_size=2), Purpose.SEARCH)
        found = store.attempts.placements(lease.job_id)
        assert {number: place.node for number, place in found.items()} == {0: None, 1: "here", 2: "node-3", 3: "lost"}
        assert (found[0].started, found[1].started > began) == (began, True)
        assert store.attempts.placements(lease.job_id, 2).keys() == {2, 3}

    @pytest.mark.prove
    def test_an_attempt_that_was_given_up_is_nowhere(self, store: Store, lease: Lease) -> None:
        attempt(store, lease)
        store.jobs.release(lease, JobState.PAUSED, "", "")
        assert store.attempts.placements(lease.job_id) == {}
