"""Tells webhooks of the jobs that ended: claims what is due, tries it, and writes down how that went."""

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from storage.errors import StorageError
from storage.service_records import Delivery, DeliveryState, DeliveryTry
from storage.store import Store

POLL_SECONDS = 1.0
AT_ONCE = 8
WAITS = (5.0, 60.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0)
"""Seconds between the tries: a receiver that is away for a day is told still."""
GONE = 410
"""The status by which a receiver says that it wants nothing more."""
log = logging.getLogger(__name__)


class Deliverer:
    """A thread of the server. Several servers on one database share the work: what one leaves is tried by another."""

    def __init__(self, store: Store, deliver: Callable[[Delivery], DeliveryTry], poll_seconds: float = POLL_SECONDS) -> None:
        self._store, self._deliver, self._poll_seconds = store, deliver, poll_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End when the tries that are under way have ended."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="webhook") as pool:
            while not self._ended.is_set():
                found: list[Delivery] = []
                try:
                    found = self._store.claim_deliveries(AT_ONCE)
                except StorageError as error:
                    log.error("webhooks: %s", error)
                list(pool.map(self._try, found))
                if len(found) < AT_ONCE:
                    self._ended.wait(self._poll_seconds)

    def _try(self, delivery: Delivery) -> None:
        try:
            tried = self._deliver(delivery)
            state, wait = after(delivery, tried)
            self._store.finish_delivery(delivery.id, tried, state, wait)
            about = {"job": delivery.job_id}
            log.info("webhook %s: job %s: %s", delivery.webhook.id, delivery.job_id, tried.status or tried.error, extra=about)
        except Exception:
            # Due again when the claim runs out; the others must not wait for it.
            log.exception("webhook %s: failed", delivery.webhook.id, extra={"job": delivery.job_id})


def after(delivery: Delivery, tried: DeliveryTry) -> tuple[DeliveryState, float]:
    """What a delivery becomes with a try, and the seconds until the next one."""
    if tried.status is not None and 200 <= tried.status < 300:
        return DeliveryState.DELIVERED, 0.0
    if len(delivery.tries) >= len(WAITS) or tried.status == GONE:
        return DeliveryState.GIVEN_UP, 0.0
    return DeliveryState.PENDING, WAITS[len(delivery.tries)] * random.uniform(0.9, 1.1)
