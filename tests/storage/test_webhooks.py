"""Webhooks: what is to be told is written with the end of the job, claimed by one process, and logged."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import create_engine, text

from search_spaces.outcome import JobState
from search_spaces.shared_records import DeliveryTry
from storage.errors import QuotaExceededError, UnknownWebhookError
from storage.leases import current_owner
from storage.records import Ask, Submission
from storage.service_records import Actor, DeliveryState, Quotas
from storage.store import Store

ANSWERED = DeliveryTry(time=datetime(2030, 1, 1, tzinfo=UTC), seconds=0.1, status=204, error="")
REFUSED = DeliveryTry(time=datetime(2030, 1, 1, tzinfo=UTC), seconds=0.2, status=None, error="timed out")


def ended_job(store: Store, submitter: str = "anna", state: JobState = JobState.SUCCEEDED) -> str:
    job = store.queue.submit({}, Submission(submitter=submitter))[0]
    lease = store.jobs.acquire(job.id, current_owner())
    store.jobs.release(lease, state, "BUDGET", "all spent")
    return job.id


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED])
def test_the_end_of_a_job_is_told_to_the_webhooks_of_its_submitter(store: Store, state: JobState) -> None:
    mine, _ = store.webhooks.create("anna", "https://a.example/x"), store.webhooks.create("bert", "https://b.example/")
    job_id = ended_job(store, state=state)
    (delivery,) = store.webhooks.claim_deliveries()
    mine = replace(mine, secret=delivery.webhook.secret)  # which was shown once
    assert (delivery.webhook, delivery.job_id, delivery.state, delivery.tries) == (mine, job_id, DeliveryState.PENDING, ())
    assert delivery.payload["type"] == "job.ended"
    assert delivery.payload["data"] == {"job": job_id, "state": state, "reason": "BUDGET", "message": "all spent"}


def test_a_job_that_pauses_is_not_told_and_one_that_is_cancelled_at_once_is(store: Store) -> None:
    store.webhooks.create("anna", "https://a.example/x")
    ended_job(store, state=JobState.PAUSED)
    assert store.webhooks.claim_deliveries() == []
    waiting = store.queue.submit({}, Submission(submitter="anna"))[0]
    store.queue.ask(waiting.id, Ask.CANCEL)
    assert [delivery.job_id for delivery in store.webhooks.claim_deliveries()] == [waiting.id]


def test_a_delivery_is_claimed_by_one_and_is_due_again_when_that_one_is_gone(store: Store, clock) -> None:
    store.webhooks.create("anna", "https://a.example/x")
    ended_job(store)
    (first,) = store.webhooks.claim_deliveries(seconds=60)
    assert store.webhooks.claim_deliveries() == []
    clock.advance(61)
    assert [delivery.id for delivery in store.webhooks.claim_deliveries()] == [first.id]


def test_tries_are_logged_and_what_failed_is_due_later(store: Store, clock) -> None:
    webhook = store.webhooks.create("anna", "https://a.example/x")
    ended_job(store)
    (delivery,) = store.webhooks.claim_deliveries()
    store.webhooks.finish_delivery(delivery.id, REFUSED, DeliveryState.PENDING, wait=300)
    clock.advance(299)
    assert store.webhooks.claim_deliveries() == []
    clock.advance(2)
    assert store.webhooks.claim_deliveries()[0].tries == (REFUSED,)
    store.webhooks.finish_delivery(delivery.id, ANSWERED, DeliveryState.DELIVERED)
    clock.advance(10_000)
    assert store.webhooks.claim_deliveries() == []
    (logged,) = store.webhooks.deliveries(webhook.id)
    assert (logged.state, logged.tries) == (DeliveryState.DELIVERED, (REFUSED, ANSWERED))
    # Told twice because a claim ran out: the first answer stays.
    store.webhooks.finish_delivery(delivery.id, REFUSED, DeliveryState.PENDING)
    assert store.webhooks.deliveries(webhook.id)[0].state is DeliveryState.DELIVERED


def test_a_webhook_goes_with_its_log(store: Store) -> None:
    webhook = store.webhooks.create("anna", "https://a.example/x")
    ended_job(store)
    (delivery,) = store.webhooks.claim_deliveries()
    store.webhooks.delete(webhook.id)
    store.webhooks.finish_delivery(delivery.id, ANSWERED, DeliveryState.DELIVERED)
    assert (store.webhooks.of(), store.webhooks.deliveries(webhook.id), store.webhooks.claim_deliveries()) == ([], [], [])
    with pytest.raises(UnknownWebhookError, match="GET /v1/webhooks"):
        store.webhooks.delete(webhook.id)


def test_an_owner_has_so_many_webhooks_at_most_and_secrets_are_not_shown(store: Store) -> None:
    limited = store.by(Actor(name="anna", limits=Quotas(webhooks=3)))
    made = [limited.webhooks.create("anna", f"https://a.example/{n}") for n in range(3)]
    with pytest.raises(QuotaExceededError, match=r"webhooks is used up \(3 of 3\); delete one"):
        limited.webhooks.create("anna", "https://a.example/more")
    assert len({webhook.secret for webhook in made}) == 3
    assert made[0].secret not in repr(made[0])
    limited.webhooks.create("bert", "https://b.example/")
    assert len(store.webhooks.of("anna")) == 3


def test_owners_take_turns_and_none_has_more_than_its_share(store: Store, clock) -> None:
    store.webhooks.create("anna", "https://a.example/x")
    store.webhooks.create("bert", "https://b.example/x")
    for _ in range(6):
        ended_job(store, "anna")
    clock.advance(60)
    ended_job(store, "bert")
    first = store.webhooks.claim_deliveries(limit=2)
    assert [delivery.webhook.owner for delivery in first] == ["anna", "bert"]
    assert store.webhooks.claim_deliveries(most=1, running={"anna": 1}) == []
    assert [delivery.webhook.owner for delivery in store.webhooks.claim_deliveries(most=3, running={"anna": 1})] == [
        "anna",
        "anna",
    ]
    assert len(store.webhooks.claim_deliveries()) == 3
    clock.advance(61)
    assert len(store.webhooks.claim_deliveries(limit=100, most=2)) == 3


@pytest.mark.prove
def test_what_waits_for_a_receiver_waits_without_a_try(store: Store, clock) -> None:
    webhook = store.webhooks.create("anna", "https://a.example/x")
    for _ in range(2):
        ended_job(store)
    (claimed,) = store.webhooks.claim_deliveries(limit=1)
    store.webhooks.finish_delivery(claimed.id, None, DeliveryState.PENDING, 30.0)
    assert store.webhooks.postpone_deliveries(webhook.id, 30.0) == 1
    clock.advance(29)
    assert store.webhooks.claim_deliveries() == []
    clock.advance(2)
    assert [delivery.tries for delivery in store.webhooks.claim_deliveries()] == [(), ()]


@pytest.mark.prove
def test_a_webhook_that_is_deleted_meanwhile_does_not_hold_up_the_end_of_a_job(store: Store, address: str) -> None:
    webhook = store.webhooks.create("anna", "https://a.example/x")
    job = store.queue.submit({}, Submission(submitter="anna"))[0]
    engine = create_engine(address.replace("postgresql:", "postgresql+psycopg:"))
    with ThreadPoolExecutor(1) as pool:
        with engine.begin() as connection:
            connection.execute(text("DELETE FROM webhooks WHERE id = :id"), {"id": webhook.id})
            asked = pool.submit(store.queue.ask, job.id, Ask.CANCEL)
            waits = text(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            while engine.dialect.name == "postgresql" and not connection.execute(waits).scalar():
                assert not asked.done()
        assert asked.result(60).state is JobState.CANCELLED
    engine.dispose()
    assert store.webhooks.claim_deliveries() == []
