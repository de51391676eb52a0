"""What is old is removed: the log of what has ended, nothing else."""

from datetime import timedelta

from search_spaces.outcome import JobState
from storage.owners import current_owner
from storage.records import Submission
from storage.service_records import DeliveryState, DeliveryTry
from storage.store import Store


def end(store: Store, key: str) -> str:
    job = store.submit({}, Submission(submitter="anna", key=key))[0]
    store.release(store.acquire(job.id, current_owner()), JobState.SUCCEEDED, "", "")
    return job.id


def test_the_log_of_old_jobs_goes_and_their_rows_stay(store: Store, clock) -> None:
    store.create_webhook("anna", "https://a.example/")
    old = end(store, "old")
    (delivery,) = store.claim_deliveries()
    store.finish_delivery(delivery.id, DeliveryTry(time=clock(), seconds=0.1, status=200), DeliveryState.DELIVERED)
    waiting = store.submit({}, Submission(submitter="anna", key="waiting"))[0]
    clock.advance(86400)
    young = end(store, "young")
    pruned = store.prune(clock() - timedelta(hours=1))
    assert (pruned.events, pruned.deliveries, pruned.submissions) == (3, 1, 1)
    assert store.events(old) == []
    assert (store.job(old).version, store.job(old).events_removed) == (3, 3)
    assert len(store.events(waiting.id)) == 1
    assert len(store.events(young)) == 3
    assert store.prune(clock() - timedelta(hours=1)).events == 0
    assert store.submit({}, Submission(submitter="anna", key="old"))[1]
    assert not store.submit({}, Submission(submitter="anna", key="young"))[1]


def test_a_job_that_goes_on_after_that_goes_on_numbering(store: Store, clock) -> None:
    job_id = end(store, "k")
    clock.advance(86400)
    store.prune(clock())
    lease = store.acquire(job_id, current_owner())
    assert [event.sequence for event in store.events(job_id)] == [4]
    store.release(lease, JobState.SUCCEEDED, "", "")
