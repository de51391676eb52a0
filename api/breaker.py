"""A circuit breaker for receivers that do not answer: it suspends them, longer each time, to free connections for others."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from storage.service_records import DeliveryTry, Webhook

FAILURES = 3
"""Consecutive tries without an answer until a receiver is suspended."""
LEAST_SECONDS, MOST_SECONDS = 30.0, 900.0
"""The first and the longest suspension; each one is twice as long as the previous."""
SLOW_SECONDS = 5.0
"""A slower answer counts as none: a slow receiver holds a connection as long as one that does not answer."""
MOST_KNOWN = 10_000
"""Most receivers that are remembered; beyond that, the least recently failed one is forgotten."""

Place = tuple[str, str]
"""An owner, and a receiver's scheme, host and port. Owners are separate: their addresses at one host may behave differently."""


@dataclass(slots=True)
class _Failing:
    failures: int = 0
    opened: int = 0
    until: float = 0.0


class Breaker:
    """Not thread-safe: used by one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: dict[Place, _Failing] = {}

    def seconds_left(self, place: Place) -> float:
        """Seconds until the receiver may be tried; 0: now."""
        failing = self._failing.get(place)
        return 0.0 if failing is None else max(0.0, failing.until - self._clock())

    def note(self, place: Place, tried: DeliveryTry) -> float:
        """Record a try; return the seconds for which this try suspends the receiver; 0: not suspended."""
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
        # One try follows the suspension; if it fails too, the next suspension is twice as long.
        wait = min(LEAST_SECONDS * 2.0**failing.opened, MOST_SECONDS)
        failing.failures, failing.opened, failing.until = FAILURES - 1, failing.opened + 1, self._clock() + wait
        return wait


def place_of(webhook: Webhook) -> Place:
    """The owner and the host of a receiver."""
    return webhook.owner, host_of(webhook)


def host_of(webhook: Webhook) -> str:
    """Scheme, host and port of the receiver; the whole URL if it cannot be parsed."""
    try:
        parts = urlsplit(webhook.url)
    except ValueError:
        return webhook.url
    return f"{parts.scheme}://{(parts.netloc.rpartition('@')[2]).lower()}"
