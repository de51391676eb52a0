"""What is old is removed: the log of what has ended, nothing else."""

from datetime import timedelta

from search_spaces.outcome import JobState
from search_spaces.shared_records import DeliveryTry
from storage.leases import current_owner
from storage.records import Submission
from storage.service_records import DeliveryState
from storage.store import Store


def end(store: Store, key: str) -> str:
    job = store.queue.submit({}, Submission(submitter="anna", key=key))[0]
    store.jobs.release(store.jobs.acquire(job.id, current_owner()), JobState.SUCCEEDED, "", "")
    return job.id


def test_the_log_of_old_jobs_goes_and_their_rows_stay(store: Store, clock) -> None:
    store.webhooks.create("anna", "https://a.example/")
    old = end(store, "old")
    (delivery,) = store.webhooks.claim_deliveries()
    store.webhooks.finish_delivery(
        delivery.id, DeliveryTry(time=clock(), seconds=0.1, status=200, error=""), DeliveryState.DELIVERED
    )
    waiting = store.queue.submit({}, Submission(submitter="anna", key="waiting"))[0]
    clock.advance(86400)
    young = end(store, "young")
    pruned = store.maintenance.prune(clock() - timedelta(hours=1))
    assert (pruned.events, pruned.deliveries, pruned.submissions) == (3, 1, 1)
    assert store.events.of(old) == []
    assert (store.jobs.get(old).version, store.jobs.get(old).events_removed) == (3, 3)
    assert len(store.events.of(waiting.id)) == 1
    assert len(store.events.of(young)) == 3
    assert store.maintenance.prune(clock() - timedelta(hours=1)).events == 0
    assert store.queue.submit({}, Submission(submitter="anna", key="old"))[1]
    assert not store.queue.submit({}, Submission(submitter="anna", key="young"))[1]


def test_a_job_that_goes_on_after_that_goes_on_numbering(store: Store, clock) -> None:
    job_id = end(store, "k")
    clock.advance(86400)
    store.maintenance.prune(clock())
    lease = store.jobs.acquire(job_id, current_owner())
    assert [event.sequence for event in store.events.of(job_id)] == [4]
    store.jobs.release(lease, JobState.SUCCEEDED, "", "")
