"""Receivers that do not answer: left alone for a while, longer each time, so that they take no connection from others."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from storage.service_records import DeliveryTry, Webhook

FAILURES = 3
"""Tries in a row without an answer until a receiver is left alone."""
LEAST_SECONDS, MOST_SECONDS = 30.0, 900.0
"""How long at first, and at most; twice as long each time."""
SLOW_SECONDS = 5.0
"""An answer that took longer is none: who answers slowly holds a connection as who does not."""
MOST_KNOWN = 10_000
"""Receivers that are remembered; then the one that failed least lately is forgotten."""

Place = tuple[str, str]
"""An owner, and a receiver's scheme, host and port: one owner's slow address says nothing of another's at the same host."""


@dataclass(slots=True)
class _Failing:
    failures: int = 0
    opened: int = 0
    until: float = 0.0


class Breaker:
    """Used from one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: dict[Place, _Failing] = {}

    def seconds_left(self, place: Place) -> float:
        """How long the receiver is left alone; 0: it may be tried."""
        failing = self._failing.get(place)
        return 0.0 if failing is None else max(0.0, failing.until - self._clock())

    def note(self, place: Place, tried: DeliveryTry) -> float:
        """Take in a try; return the seconds for which the receiver is left alone from now on, where this try made it so."""
        failing = self._failing.pop(place, None)
        if tried.status is not None and tried.seconds < SLOW_SECONDS:
            return 0.0
        failing = failing or _Failing()
        while len(self._failing) >= MOST_KNOWN:
            del self._failing[next(iter(self._failing))]
        self._failing[place] = failing
        failing.failures += 1
        if failing.failures < FAILURES:
            return 0.0
        # One more try when the time is over: if that fails too, the next time is twice as long.
        wait = min(LEAST_SECONDS * 2.0**failing.opened, MOST_SECONDS)
        failing.failures, failing.opened, failing.until = FAILURES - 1, failing.opened + 1, self._clock() + wait
        return wait


def place_of(webhook: Webhook) -> Place:
    """Whose receiver it is, and where."""
    return webhook.owner, host_of(webhook)


def host_of(webhook: Webhook) -> str:
    """Scheme, host and port of the receiver; of a damaged address, all of it."""
    try:
        parts = urlsplit(webhook.url)
    except ValueError:
        return webhook.url
    return f"{parts.scheme}://{(parts.netloc.rpartition('@')[2]).lower()}"
