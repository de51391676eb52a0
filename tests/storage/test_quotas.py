"""What owners may take: counted where it is written, and refused with what is used and what may be."""

import math

import pytest

from search_spaces.outcome import JobState, Purpose
from search_spaces.trial import LogLines
from search_spaces.trial_config import TrialConfig
from storage.errors import QuotaExceededError
from storage.leases import current_owner
from storage.records import Ask, QueueLimits, Submission
from storage.service_records import Actor, Quota, Quotas
from storage.store import Store


def submission(owner: str, limits: Quotas, key: str | None = None) -> Submission:
    return Submission(submitter=owner, key=key, body_hash="b", by=Actor(name=owner, limits=limits))


def used(store: Store, owner: str, quota: Quota) -> float:
    return next(use.used for use in store.quotas.uses(owner, Quotas()) if use.quota is quota)


class TestQueuedJobs:
    def test_one_more_than_may_wait_is_refused_and_nothing_of_it_is_written(self, store: Store) -> None:
        limits = Quotas(queued_jobs=2)
        jobs = [store.queue.submit({"n": n}, submission("anna", limits))[0].id for n in range(2)]
        with pytest.raises(QuotaExceededError, match=r"queued_jobs is used up \(2 of 2\)") as refused:
            store.queue.submit({}, submission("anna", limits))
        assert (refused.value.quota, refused.value.used, refused.value.most) == ("queued_jobs", 2, 2)
        assert {job.id for job in store.jobs.newest()} == {*jobs}
        store.queue.submit({}, submission("bert", limits))
        store.queue.ask(jobs[0], Ask.CANCEL)
        store.queue.submit({}, submission("anna", limits))

    def test_those_that_come_together_share_what_is_left(self, store: Store) -> None:
        limits = Quotas(queued_jobs=2)
        answers = store.queue.submit_all([({"n": n}, submission("anna", limits)) for n in range(4)])
        assert [isinstance(answer, QuotaExceededError) for answer in answers] == [False, False, True, True]
        assert used(store, "anna", Quota.QUEUED_JOBS) == 2

    def test_a_submission_that_is_sent_again_is_no_second_job(self, store: Store) -> None:
        limits = Quotas(queued_jobs=1)
        first, _ = store.queue.submit({}, submission("anna", limits, "k"))
        assert store.queue.submit({}, submission("anna", limits, "k")) == (first, False)

    def test_a_job_that_is_resumed_waits_too(self, store: Store) -> None:
        limits = Quotas(queued_jobs=1)
        paused = store.queue.submit({}, submission("anna", limits))[0]
        store.queue.ask(paused.id, Ask.PAUSE)
        store.queue.submit({}, submission("anna", limits))
        with pytest.raises(QuotaExceededError):
            store.by(Actor(name="anna", limits=limits)).queue.ask(paused.id, Ask.RESUME)
        assert store.jobs.get(paused.id).state is JobState.PAUSED


class TestStoredBytes:
    def test_requests_and_what_trials_print_count_until_they_are_removed(self, store: Store, clock) -> None:
        job = store.queue.submit({"note": "x" * 1000}, Submission(submitter="anna"))[0]
        of_request = used(store, "anna", Quota.STORED_BYTES)
        assert 1000 < of_request < 1100
        lease = store.jobs.acquire(job.id, current_owner())
        store.trials.add(lease, TrialConfig(), Purpose.SEARCH)
        attempt = store.attempts.start(lease, 0)
        store.logs.add(lease, [LogLines(attempt=attempt.token, rank=0, text="y" * 500)])
        assert used(store, "anna", Quota.STORED_BYTES) == of_request + 500
        store.jobs.release(lease, JobState.CANCELLED, "cancelled", "")
        clock.advance(10)
        store.maintenance.prune(clock())
        assert used(store, "anna", Quota.STORED_BYTES) == of_request
        store.jobs.delete(job.id)
        assert used(store, "anna", Quota.STORED_BYTES) == 0

    @pytest.mark.prove
    def test_what_is_left_out_of_long_output_does_not_count(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("storage.events.LOG_HEAD_BYTES", 100)
        monkeypatch.setattr("storage.events.LOG_TAIL_BYTES", 100)
        job = store.queue.submit({}, Submission(submitter="anna"))[0]
        before = used(store, "anna", Quota.STORED_BYTES)
        lease = store.jobs.acquire(job.id, current_owner())
        store.trials.add(lease, TrialConfig(), Purpose.SEARCH)
        attempt = store.attempts.start(lease, 0)
        for _ in range(50):
            store.logs.add(lease, [LogLines(attempt=attempt.token, rank=0, text="z" * 100)])
        kept = sum(part.size for part in store.logs.of(job.id, 0))
        assert used(store, "anna", Quota.STORED_BYTES) == before + kept < before + 500

    def test_a_request_or_a_change_that_does_not_fit_is_refused(self, store: Store) -> None:
        limits = Quotas(stored_bytes=2000)
        job = store.queue.submit({"note": "x" * 1000}, submission("anna", limits))[0]
        with pytest.raises(QuotaExceededError, match="stored_bytes"):
            store.queue.submit({"note": "x" * 1000}, submission("anna", limits))
        mine = store.by(Actor(name="anna", limits=limits))
        for number in range(40):  # each value that a field had stays in an event
            try:
                mine.queue.change_request(job.id, None, {"note": f"{number:03}" * 33})
            except QuotaExceededError:
                break
        else:
            pytest.fail("changes are not counted")
        assert used(store, "anna", Quota.STORED_BYTES) <= 2000


class TestDeviceHours:
    def test_who_has_used_them_may_not_submit_and_no_worker_takes_their_jobs(self, store: Store, clock) -> None:
        first, second = (store.queue.submit({}, Submission(submitter="anna"))[0].id for _ in range(2))
        store.quotas.set_limit("anna", Quota.DEVICE_HOURS, 1)
        lease = store.queue.claim(current_owner(), seconds=9000)
        assert lease is not None
        clock.advance(3600)
        store.jobs.heartbeat(lease)
        assert used(store, "anna", Quota.DEVICE_HOURS) == 1
        assert store.queue.claim(current_owner()) is None, "although the worker itself has no limit"
        with pytest.raises(QuotaExceededError, match=r"device_hours is used up \(1 of 1\)"):
            store.queue.submit({}, submission("anna", Quotas()))
        store.quotas.set_limit("anna", Quota.DEVICE_HOURS, math.inf)
        other = store.queue.claim(current_owner(), limits=QueueLimits(device_seconds=1))
        assert other is not None, "their own limit goes before the worker's"
        assert {lease.job_id, other.job_id} == {first, second}


class TestOwnLimits:
    def test_an_owner_may_have_others_than_everybody(self, store: Store) -> None:
        defaults = Quotas(queued_jobs=1)
        store.quotas.set_limit("anna", Quota.QUEUED_JOBS, 3)
        store.quotas.set_limit("anna", Quota.WEBHOOKS, math.inf)
        assert store.quotas.limits("anna", defaults) == Quotas(queued_jobs=3, webhooks=None)
        assert store.quotas.limits("bert", defaults) == defaults
        for _ in range(3):
            store.queue.submit({}, submission("anna", defaults))
        with pytest.raises(QuotaExceededError, match="3 of 3"):
            store.queue.submit({}, submission("anna", defaults))
        store.quotas.set_limit("anna", Quota.QUEUED_JOBS, None)
        assert store.quotas.limits("anna", defaults).queued_jobs == 1

    def test_whoever_has_the_database_is_not_limited(self, store: Store) -> None:
        store.quotas.set_limit("anna", Quota.QUEUED_JOBS, 0)
        store.queue.submit({}, Submission(submitter="anna"))
