"""Who waits for whom: nobody's receivers hold up those of others."""

import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from api.deliverer import (
    AT_A_HOST,
    FAILURES,
    LEAST_SECONDS,
    MOST_SECONDS,
    OF_AN_OWNER,
    SLOW_SECONDS,
    Breaker,
    Deliverer,
    checked_target,
    networks,
)
from autotune.errors import RequestError
from search_spaces.shared_records import DeliveryTry
from storage.records import Ask, Submission
from storage.service_records import DeliveryRecord
from storage.store import Store

WELL = DeliveryTry(time=datetime.now(UTC), seconds=0.1, status=204, error="")
UNANSWERED = DeliveryTry(time=datetime.now(UTC), seconds=10.0, status=None, error="timed out")


def end_jobs(store: Store, owner: str, count: int) -> None:
    for _ in range(count):
        store.queue.ask(store.queue.submit({}, Submission(submitter=owner))[0].id, Ask.CANCEL)


class Receivers:
    """Answers of made-up receivers; those of a silent owner hold their tries until they are let go."""

    def __init__(self, silent: str) -> None:
        self.silent, self.go = silent, threading.Event()
        self.tried: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._changed = threading.Condition()

    def __call__(self, delivery: DeliveryRecord) -> DeliveryTry:
        owner = delivery.webhook.owner
        with self._changed:
            self.under_way[owner] += 1
            self.most[owner] = max(self.most[owner], self.under_way[owner])
            self._changed.notify_all()
        if owner.startswith(self.silent):
            assert self.go.wait(120)
        with self._changed:
            self.under_way[owner] -= 1
            self.tried[owner] += 1
            self._changed.notify_all()
        return UNANSWERED if owner.startswith(self.silent) else WELL

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, 120)


def test_an_owner_with_slow_receivers_waits_for_them_alone(store: Store) -> None:
    store.webhooks.create("mallory", "https://slow.example/")
    store.webhooks.create("anna", "https://a.example/")
    end_jobs(store, "mallory", 40)
    end_jobs(store, "anna", 10)
    receivers = Receivers("mallory")
    deliverer = Deliverer(store, receivers, 0.01)
    deliverer.start()
    try:
        # None of mallory's tries has ended.
        receivers.wait_for(lambda: receivers.tried["anna"] == 10)
        assert receivers.tried["mallory"] == 0
        assert receivers.most["mallory"] <= OF_AN_OWNER
    finally:
        receivers.go.set()
        deliverer.close()
    # Left alone after some tries, and the others are not lost: they are due later.
    assert receivers.tried["mallory"] <= FAILURES + OF_AN_OWNER
    states = [item.state for webhook in store.webhooks.of("mallory") for item in store.webhooks.deliveries(webhook.id, 100)]
    assert Counter(states) == {"pending": 40}


def test_a_host_has_its_share_whoever_owns_what_is_sent_there(store: Store) -> None:
    for number in range(6):
        store.webhooks.create(f"mallory{number}", "https://SLOW.example:443/")
        end_jobs(store, f"mallory{number}", 3)
    store.webhooks.create("anna", "https://a.example/")
    end_jobs(store, "anna", 5)
    receivers = Receivers("mallory")
    deliverer = Deliverer(store, receivers, 0.01)
    deliverer.start()
    try:
        receivers.wait_for(lambda: receivers.tried["anna"] == 5 and receivers.under_way.total() == AT_A_HOST)
    finally:
        receivers.go.set()
        deliverer.close()


def test_a_receiver_is_left_alone_longer_each_time_and_tried_once_in_between() -> None:
    now = 0.0
    breaker, place = Breaker(lambda: now), ("anna", "https://a.example")
    waits = [breaker.note(place, UNANSWERED) for _ in range(FAILURES)]
    assert waits == [0.0] * (FAILURES - 1) + [LEAST_SECONDS]
    assert breaker.seconds_left(place) == LEAST_SECONDS
    assert breaker.seconds_left(("bert", "https://a.example")) == 0.0
    for wait in (2 * LEAST_SECONDS, 4 * LEAST_SECONDS):
        now += MOST_SECONDS
        assert breaker.seconds_left(place) == 0.0
        assert breaker.note(place, DeliveryTry(time=WELL.time, seconds=SLOW_SECONDS, status=200, error="")) == wait
    assert [breaker.note(place, UNANSWERED) for _ in range(9)][-1] == MOST_SECONDS
    assert breaker.note(place, WELL) == 0.0
    assert breaker.seconds_left(place) == 0.0


@pytest.mark.parametrize("allowed", [[], ["0.0.0.0/0", "::/0"]], ids=["none", "all"])
@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "169.254.170.2", "[fd00:ec2::254]", "[fd20:ce::254]", "100.100.100.200", "192.0.0.192", "168.63.129.16",
     "192.0.0.9", "192.0.0.170", "192.88.99.1", "[::ffff:168.63.129.16]", "2822734096", "0xa83f8110"],
)  # fmt: skip
def test_no_receiver_is_where_clouds_tell_machines_their_secrets(address: str, allowed: list[str]) -> None:
    with pytest.raises(RequestError, match="is not on the public internet"):
        checked_target(f"http://{address}/", networks(allowed))


def test_one_that_is_named_by_itself_may_be_called() -> None:
    assert checked_target("http://168.63.129.16/", networks(["168.63.129.16/32"])).address == "168.63.129.16"
