"""Delivers webhooks for jobs that ended: claims due deliveries, tries them, and records the results."""

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from api.breaker import Breaker, host_of, place_of
from storage.errors import StorageError
from storage.service_records import Delivery, DeliveryState, DeliveryTry
from storage.store import Store

POLL_SECONDS = 1.0
AT_ONCE = 16
"""Most concurrent tries."""
OF_AN_OWNER, AT_A_HOST = 3, 6
"""Most concurrent tries of one owner, and to one receiver's host."""
CLAIM_SECONDS = 120.0
"""Longer than any try, even if its DNS look-up times out."""
BUSY_SECONDS = 5.0
"""How long a webhook waits if its host is at the limit."""
WAITS = (5.0, 60.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0)
"""Seconds between the tries, 31 hours in total: a receiver that is down for a day still gets its deliveries."""
GONE = 410
"""The status with which a receiver declines all further tries."""
log = logging.getLogger(__name__)


class Deliverer:
    """A delivery thread of the server. Several servers on one database share the work.

    Slow receivers of one owner do not delay those of others: owners and hosts are limited to a share of the tries, owners take
    turns, and a receiver that does not answer is suspended (`api.breaker`).
    """

    def __init__(self, store: Store, deliver: Callable[[Delivery], DeliveryTry], poll_seconds: float = POLL_SECONDS) -> None:
        self._store, self._deliver, self._poll_seconds = store, deliver, poll_seconds
        self._breaker = Breaker()
        self._running: dict[Future[DeliveryTry | None], Delivery] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Wait for the running tries, then end the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="webhook") as pool:
            while not self._ended.is_set():
                try:
                    began = self._begin(pool)
                except StorageError as error:
                    log.error("webhooks: %s", error)
                    began = 0
                except Exception:
                    # Continue with other deliveries after any error.
                    log.exception("webhooks: failed")
                    began = 0
                if self._running:
                    wait(self._running, self._poll_seconds, FIRST_COMPLETED)
                    self._note_ended()
                elif not began:
                    self._ended.wait(self._poll_seconds)

    def _begin(self, pool: ThreadPoolExecutor) -> int:
        """Start the tries that are due and allowed now; return their number."""
        free = AT_ONCE - len(self._running)
        if not free:
            return 0
        owners = Counter(delivery.webhook.owner for delivery in self._running.values())
        began = 0
        for delivery in self._store.claim_deliveries(free, CLAIM_SECONDS, OF_AN_OWNER, owners):
            hosts = Counter(host_of(other.webhook) for other in self._running.values())
            suspended = self._breaker.seconds_left(place_of(delivery.webhook))
            if suspended or hosts[host_of(delivery.webhook)] >= AT_A_HOST:
                self._postpone(delivery, suspended or BUSY_SECONDS)
            else:
                self._running[pool.submit(self._try, delivery)] = delivery
                began += 1
        return began

    def _postpone(self, delivery: Delivery, seconds: float) -> None:
        # The claimed delivery would be due only after its claim expires, so release it too.
        self._store.finish_delivery(delivery.id, None, DeliveryState.PENDING, seconds)
        self._store.postpone_deliveries(delivery.webhook.id, seconds)

    def _note_ended(self) -> None:
        for future in [future for future in self._running if future.done()]:
            delivery, tried = self._running.pop(future), future.result()
            if tried is None:
                continue
            if seconds := self._breaker.note(place_of(delivery.webhook), tried):
                log.warning(
                    "webhook %s: %s does not answer, and is suspended for %.0f s",
                    delivery.webhook.id, host_of(delivery.webhook), seconds,
                )  # fmt: skip

    def _try(self, delivery: Delivery) -> DeliveryTry | None:
        """Make one try and record it; None: it could not be recorded."""
        try:
            tried = self._deliver(delivery)
            state, seconds = after(delivery, tried)
            self._store.finish_delivery(delivery.id, tried, state, seconds)
            about = {"job": delivery.job_id}
            log.info("webhook %s: job %s: %s", delivery.webhook.id, delivery.job_id, tried.status or tried.error, extra=about)
        except StorageError as error:
            log.error("webhook %s: %s", delivery.webhook.id, error, extra={"job": delivery.job_id})
            return None
        except Exception:
            # It is due again when the claim expires; the others must not wait for it.
            log.exception("webhook %s: failed", delivery.webhook.id, extra={"job": delivery.job_id})
            return None
        return tried


def after(delivery: Delivery, tried: DeliveryTry) -> tuple[DeliveryState, float]:
    """The state of a delivery after a try, and the seconds until the next one."""
    if tried.status is not None and 200 <= tried.status < 300:
        return DeliveryState.DELIVERED, 0.0
    if len(delivery.tries) >= len(WAITS) or tried.status == GONE:
        return DeliveryState.GIVEN_UP, 0.0
    return DeliveryState.PENDING, WAITS[len(delivery.tries)] * random.uniform(0.9, 1.1)
