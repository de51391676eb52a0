"""Tells webhooks of the jobs that ended: claims what is due, tries it, and writes down how that went."""

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
"""Tries that are under way at a time."""
OF_AN_OWNER, AT_A_HOST = 3, 6
"""The most of them of one owner, and at one receiver's host."""
CLAIM_SECONDS = 120.0
"""More than a try takes, the look-up of a name by a resolver that does not answer included."""
BUSY_SECONDS = 5.0
"""How long a webhook waits whose host has as many as it may."""
WAITS = (5.0, 60.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0)
"""Seconds between the tries: a receiver that is away for a day is told still."""
GONE = 410
"""The status by which a receiver says that it wants nothing more."""
log = logging.getLogger(__name__)


class Deliverer:
    """A thread of the server. Several servers on one database share the work: what one leaves is tried by another.

    Nobody's slow receivers hold up those of others: an owner and a host have a share of the tries alone, owners take turns, and
    a receiver that does not answer is left alone for a while (`api.breaker`).
    """

    def __init__(self, store: Store, deliver: Callable[[Delivery], DeliveryTry], poll_seconds: float = POLL_SECONDS) -> None:
        self._store, self._deliver, self._poll_seconds = store, deliver, poll_seconds
        self._breaker = Breaker()
        self._running: dict[Future[DeliveryTry | None], Delivery] = {}
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
                try:
                    began = self._begin(pool)
                except StorageError as error:
                    log.error("webhooks: %s", error)
                    began = 0
                except Exception:
                    # Whatever it was, deliveries of others go on.
                    log.exception("webhooks: failed")
                    began = 0
                if self._running:
                    wait(self._running, self._poll_seconds, FIRST_COMPLETED)
                    self._note_ended()
                elif not began:
                    self._ended.wait(self._poll_seconds)

    def _begin(self, pool: ThreadPoolExecutor) -> int:
        """Begin what is due and may be tried now; return how many tries that are."""
        room = AT_ONCE - len(self._running)
        if not room:
            return 0
        owners = Counter(delivery.webhook.owner for delivery in self._running.values())
        began = 0
        for delivery in self._store.claim_deliveries(room, CLAIM_SECONDS, OF_AN_OWNER, owners):
            hosts = Counter(host_of(other.webhook) for other in self._running.values())
            alone = self._breaker.seconds_left(place_of(delivery.webhook))
            if alone or hosts[host_of(delivery.webhook)] >= AT_A_HOST:
                self._postpone(delivery, alone or BUSY_SECONDS)
            else:
                self._running[pool.submit(self._try, delivery)] = delivery
                began += 1
        return began

    def _postpone(self, delivery: Delivery, seconds: float) -> None:
        # The claimed one is due after its claim: it is given back by the same stroke.
        self._store.finish_delivery(delivery.id, None, DeliveryState.PENDING, seconds)
        self._store.postpone_deliveries(delivery.webhook.id, seconds)

    def _note_ended(self) -> None:
        for future in [future for future in self._running if future.done()]:
            delivery, tried = self._running.pop(future), future.result()
            if tried is None:
                continue
            if seconds := self._breaker.note(place_of(delivery.webhook), tried):
                log.warning(
                    "webhook %s: %s does not answer, and is left alone for %.0f s",
                    delivery.webhook.id, host_of(delivery.webhook), seconds,
                )  # fmt: skip

    def _try(self, delivery: Delivery) -> DeliveryTry | None:
        """None: it could not be written down."""
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
            # Due again when the claim runs out; the others must not wait for it.
            log.exception("webhook %s: failed", delivery.webhook.id, extra={"job": delivery.job_id})
            return None
        return tried


def after(delivery: Delivery, tried: DeliveryTry) -> tuple[DeliveryState, float]:
    """What a delivery becomes with a try, and the seconds until the next one."""
    if tried.status is not None and 200 <= tried.status < 300:
        return DeliveryState.DELIVERED, 0.0
    if len(delivery.tries) >= len(WAITS) or tried.status == GONE:
        return DeliveryState.GIVEN_UP, 0.0
    return DeliveryState.PENDING, WAITS[len(delivery.tries)] * random.uniform(0.9, 1.1)
