"""What owners may take: counted where it is written, and refused with what is used and what may be."""

import math

import pytest

from search_spaces.outcome import JobState, Purpose
from search_spaces.trial import LogLines
from search_spaces.trial_config import TrialConfig
from storage.errors import QuotaExceededError
from storage.owners import current_owner
from storage.records import Ask, QueueLimits, Submission
from storage.service_records import Actor, Quota, Quotas
from storage.store import Store


def submission(owner: str, limits: Quotas, key: str | None = None) -> Submission:
    return Submission(submitter=owner, key=key, body_hash="b", by=Actor(name=owner, limits=limits))


def used(store: Store, owner: str, quota: Quota) -> float:
    return next(use.used for use in store.quotas(owner, Quotas()) if use.quota is quota)


class TestQueuedJobs:
    def test_one_more_than_may_wait_is_refused_and_nothing_of_it_is_written(self, store: Store) -> None:
        limits = Quotas(queued_jobs=2)
        jobs = [store.submit({"n": n}, submission("anna", limits))[0].id for n in range(2)]
        with pytest.raises(QuotaExceededError, match=r"queued_jobs is used up \(2 of 2\)") as refused:
            store.submit({}, submission("anna", limits))
        assert (refused.value.quota, refused.value.used, refused.value.most) == ("queued_jobs", 2, 2)
        assert {job.id for job in store.jobs()} == {*jobs}
        store.submit({}, submission("bert", limits))
        store.ask(jobs[0], Ask.CANCEL)
        store.submit({}, submission("anna", limits))

    def test_those_that_come_together_share_what_is_left(self, store: Store) -> None:
        limits = Quotas(queued_jobs=2)
        answers = store.submit_all([({"n": n}, submission("anna", limits)) for n in range(4)])
        assert [isinstance(answer, QuotaExceededError) for answer in answers] == [False, False, True, True]
        assert used(store, "anna", Quota.QUEUED_JOBS) == 2

    def test_a_submission_that_is_sent_again_is_no_second_job(self, store: Store) -> None:
        limits = Quotas(queued_jobs=1)
        first, _ = store.submit({}, submission("anna", limits, "k"))
        assert store.submit({}, submission("anna", limits, "k")) == (first, False)

    def test_a_job_that_is_resumed_waits_too(self, store: Store) -> None:
        limits = Quotas(queued_jobs=1)
        paused = store.submit({}, submission("anna", limits))[0]
        store.ask(paused.id, Ask.PAUSE)
        store.submit({}, submission("anna", limits))
        with pytest.raises(QuotaExceededError):
            store.by(Actor(name="anna", limits=limits)).ask(paused.id, Ask.RESUME)
        assert store.job(paused.id).state is JobState.PAUSED


class TestStoredBytes:
    def test_requests_and_what_trials_print_count_until_they_are_removed(self, store: Store, clock) -> None:
        job = store.submit({"note": "x" * 1000}, Submission(submitter="anna"))[0]
        of_request = used(store, "anna", Quota.STORED_BYTES)
        assert 1000 < of_request < 1100
        lease = store.acquire(job.id, current_owner())
        store.add_trial(lease, TrialConfig(), Purpose.SEARCH)
        attempt = store.start_attempt(lease, 0)
        store.add_output(lease, [LogLines(attempt=attempt.token, rank=0, text="y" * 500)])
        assert used(store, "anna", Quota.STORED_BYTES) == of_request + 500
        store.release(lease, JobState.CANCELLED, "cancelled", "")
        clock.advance(10)
        store.prune(clock())
        assert used(store, "anna", Quota.STORED_BYTES) == of_request
        store.delete_job(job.id)
        assert used(store, "anna", Quota.STORED_BYTES) == 0

    @pytest.mark.prove
    def test_what_is_left_out_of_long_output_does_not_count(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("storage.logs.LOG_HEAD_BYTES", 100)
        monkeypatch.setattr("storage.logs.LOG_TAIL_BYTES", 100)
        job = store.submit({}, Submission(submitter="anna"))[0]
        before = used(store, "anna", Quota.STORED_BYTES)
        lease = store.acquire(job.id, current_owner())
        store.add_trial(lease, TrialConfig(), Purpose.SEARCH)
        attempt = store.start_attempt(lease, 0)
        for _ in range(50):
            store.add_output(lease, [LogLines(attempt=attempt.token, rank=0, text="z" * 100)])
        kept = sum(part.size for part in store.logs(job.id, 0))
        assert used(store, "anna", Quota.STORED_BYTES) == before + kept < before + 500

    def test_a_request_or_a_change_that_does_not_fit_is_refused(self, store: Store) -> None:
        limits = Quotas(stored_bytes=2000)
        job = store.submit({"note": "x" * 1000}, submission("anna", limits))[0]
        with pytest.raises(QuotaExceededError, match="stored_bytes"):
            store.submit({"note": "x" * 1000}, submission("anna", limits))
        mine = store.by(Actor(name="anna", limits=limits))
        for number in range(40):  # each value that a field had stays in an event
            try:
                mine.change_request(job.id, None, {"note": f"{number:03}" * 33})
            except QuotaExceededError:
                break
        else:
            pytest.fail("changes are not counted")
        assert used(store, "anna", Quota.STORED_BYTES) <= 2000


class TestDeviceHours:
    def test_who_has_used_them_may_not_submit_and_no_worker_takes_their_jobs(self, store: Store, clock) -> None:
        first, second = (store.submit({}, Submission(submitter="anna"))[0].id for _ in range(2))
        store.set_quota("anna", Quota.DEVICE_HOURS, 1)
        lease = store.claim(current_owner(), seconds=9000)
        assert lease is not None
        clock.advance(3600)
        store.heartbeat(lease)
        assert used(store, "anna", Quota.DEVICE_HOURS) == 1
        assert store.claim(current_owner()) is None, "although the worker itself has no limit"
        with pytest.raises(QuotaExceededError, match=r"device_hours is used up \(1 of 1\)"):
            store.submit({}, submission("anna", Quotas()))
        store.set_quota("anna", Quota.DEVICE_HOURS, math.inf)
        other = store.claim(current_owner(), limits=QueueLimits(device_seconds=1))
        assert other is not None, "their own limit goes before the worker's"
        assert {lease.job_id, other.job_id} == {first, second}


class TestOwnLimits:
    def test_an_owner_may_have_others_than_everybody(self, store: Store) -> None:
        defaults = Quotas(queued_jobs=1)
        store.set_quota("anna", Quota.QUEUED_JOBS, 3)
        store.set_quota("anna", Quota.WEBHOOKS, math.inf)
        assert store.limits("anna", defaults) == Quotas(queued_jobs=3, webhooks=None)
        assert store.limits("bert", defaults) == defaults
        for _ in range(3):
            store.submit({}, submission("anna", defaults))
        with pytest.raises(QuotaExceededError, match="3 of 3"):
            store.submit({}, submission("anna", defaults))
        store.set_quota("anna", Quota.QUEUED_JOBS, None)
        assert store.limits("anna", defaults).queued_jobs == 1

    def test_whoever_has_the_database_is_not_limited(self, store: Store) -> None:
        store.set_quota("anna", Quota.QUEUED_JOBS, 0)
        store.submit({}, Submission(submitter="anna"))
