"""Workers that tell of themselves, and what submitters use."""

from datetime import UTC, datetime

import pytest

from search_spaces.outcome import JobState
from storage.leases import current_owner
from storage.records import QueueLimits, Submission
from storage.service_records import WorkerRecord
from storage.store import Store


def worker(name: str, **changes: object) -> WorkerRecord:
    long_ago = datetime(2000, 1, 1, tzinfo=UTC)
    values = {"host": "here", "pid": 7, "started": long_ago, "seen": long_ago, "job_id": None, "runner": "", "problem": ""}
    return WorkerRecord(id=name, **{**values, **changes})  # type: ignore[arg-type]


def test_workers_are_seen_while_they_beat(store: Store, clock) -> None:
    store.workers.beat(worker("a"))
    clock.advance(50)
    store.workers.beat(worker("b", job_id="20300101-000000-abcd", runner="ray", problem="no\0room"))
    assert [item.id for item in store.workers.alive()] == ["a", "b"]
    b = store.workers.alive()[1]
    assert (b.job_id, b.runner, b.problem, b.started, b.seen) == ("20300101-000000-abcd", "ray", "no\\0room", clock(), clock())
    clock.advance(20)
    assert [item.id for item in store.workers.alive()] == ["b"]
    store.workers.beat(worker("a"))
    assert {item.id for item in store.workers.alive()} == {"a", "b"}
    store.workers.retire("b")
    store.workers.retire("b")
    assert [item.id for item in store.workers.alive()] == ["a"]


def test_a_worker_that_was_long_away_is_forgotten(store: Store, clock) -> None:
    store.workers.beat(worker("a"))
    clock.advance(2 * 86400)
    store.workers.beat(worker("b"))
    assert [item.id for item in store.workers.alive(1e7)] == ["b"]


def run_for(store: Store, clock, seconds: float, submitter: str, devices: int) -> None:
    job = store.queue.submit({}, Submission(submitter=submitter, devices=devices))[0]
    lease = store.jobs.acquire(job.id, current_owner())
    while seconds > 0:
        clock.advance(min(seconds, 10.0))
        seconds -= 10.0
        lease = store.jobs.heartbeat(lease)
    store.jobs.release(lease, JobState.SUCCEEDED, "", "")
    assert store.jobs.get(job.id).devices == devices


def test_usage_is_seconds_times_devices_by_submitter_and_day(store: Store, clock) -> None:
    run_for(store, clock, 25.0, "anna", devices=4)
    run_for(store, clock, 10.0, "anna", devices=1)
    run_for(store, clock, 7.0, "bert", devices=2)
    store.queue.submit({}, Submission(submitter="anna"))
    used = store.workers.usage("anna")
    assert (used.day, used.device_seconds, used.running_jobs, used.queued_jobs) == ("2030-01-01", 110.0, 0, 1)
    assert store.workers.usage("bert").device_seconds == 14.0
    clock.advance(86400)
    assert store.workers.usage("anna").device_seconds == 0.0


@pytest.mark.prove
def test_a_submitter_who_has_used_a_days_share_waits_for_the_next_day(store: Store, clock) -> None:
    limits = QueueLimits(device_seconds=100.0)
    run_for(store, clock, 30.0, "anna", devices=4)
    hers = store.queue.submit({}, Submission(submitter="anna", priority=5))[0]
    his = store.queue.submit({}, Submission(submitter="bert"))[0]
    lease = store.queue.claim(current_owner(), limits=limits)
    assert lease is not None
    assert lease.job_id == his.id
    assert store.queue.claim(current_owner(), limits=limits) is None
    clock.advance(86400)
    later = store.queue.claim(current_owner(), limits=limits)
    # What the dead left behind comes first, whoever's it is.
    assert later is not None
    assert later.job_id in (hers.id, his.id)
    last = store.queue.claim(current_owner(), limits=limits)
    assert last is not None
    assert {later.job_id, last.job_id} == {hers.id, his.id}
