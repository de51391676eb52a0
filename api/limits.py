"""Limits: the rates of clients and the quotas of owners."""

import asyncio
import hashlib
import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from starlette.exceptions import HTTPException

from storage.service_records import Quota, Quotas, QuotaUseRecord
from storage.store import Store

MOST_CLIENTS = 10_000
"""Most clients whose rate is remembered; the least recently seen one is forgotten first."""


class Rates:
    """A token bucket for each client."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._clock = per_second, clock
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client -> remaining tokens, and the time of that count."""

    def wait(self, client: str) -> float:
        """Seconds until the client may send a request; 0: now, and this request is counted."""
        if self._per_second <= 0:
            return 0.0
        now, most = self._clock(), self._per_second * 10.0  # a burst of 10 seconds
        tokens, refilled = self._clients.pop(client, (most, now))
        tokens = min(most, tokens + (now - refilled) * self._per_second)
        allowed = tokens >= 1.0
        self._clients[client] = (tokens - 1.0 if allowed else tokens, now)
        while len(self._clients) > MOST_CLIENTS:
            self._clients.popitem(last=False)
        return 0.0 if allowed else (1.0 - tokens) / self._per_second


class KnownKeys:
    """Digests of Authorization headers that were valid once. Each of these has its own rate limit.

    Other headers do not identify a client: with a new one for each request, the limit would never apply. Used from several
    threads; each step is one atomic dict operation.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[str, None] = OrderedDict()

    def add(self, header: str) -> None:
        """Remember a header that was valid."""
        self._digests[_digest(header)] = None
        while len(self._digests) > MOST_CLIENTS:
            self._digests.popitem(last=False)

    def client(self, header: str | None, address: str) -> str:
        """The client that a request counts for: its key or its address."""
        if header is not None and (digest := _digest(header)) in self._digests:
            return digest
        return network_of(address)


def _digest(header: str) -> str:
    """Digest of the normalised header, because a key can be written in several ways."""
    scheme, _, text = header.partition(" ")
    header = f"{scheme.lower()} {text.strip()}"
    return hashlib.sha256(header.encode("latin-1", "replace")).hexdigest()


def network_of(address: str) -> str:
    """The address; for IPv6 its 64-bit network, which belongs to one machine."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((ip, 64), strict=False)) if ip.version == 6 else address


LIMIT_SECONDS = 5.0
"""How long the limits of an owner are cached."""


class OwnerLimits:
    """The limits of each owner. The store counts jobs, bytes, device-hours and webhooks when it writes them."""

    def __init__(self, store: Store, defaults: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._defaults, self._clock = store, defaults, clock
        self._known: OrderedDict[str, tuple[float, Quotas]] = OrderedDict()
        self.streams: Counter[str] = Counter()
        """Owner -> open streams of this process."""

    async def most(self, owner: str, quota: Quota) -> float | None:
        """The limit of an owner, at most `LIMIT_SECONDS` old; None: no limit."""
        now = self._clock()
        until, limits = self._known.get(owner, (now, self._defaults))
        if until <= now:
            limits = await asyncio.to_thread(self._store.quotas.limits, owner, self._defaults)
            self._known.pop(owner, None)
            self._known[owner] = (now + LIMIT_SECONDS, limits)
            while len(self._known) > 10_000:  # the one that was looked up first is removed first
                self._known.popitem(last=False)
        return limits.of(quota)

    @asynccontextmanager
    async def stream(self, owner: str) -> AsyncIterator[None]:
        """Hold a place for one stream of this process.

        Raises:
            HTTPException: 429, because the owner has the most streams allowed.
        """
        most = await self.most(owner, Quota.STREAMS)
        if most is not None and self.streams[owner] >= most:
            detail = f"streams: {most:g} of yours are open on this process; close some, or follow fewer jobs"
            raise HTTPException(429, detail, {"Retry-After": "10"})
        self.streams[owner] += 1
        try:
            yield
        finally:
            self.streams[owner] -= 1
            if not self.streams[owner]:
                del self.streams[owner]

    def uses(self, owner: str) -> list[QuotaUseRecord]:
        """What an owner uses of each quota. Runs in a thread."""
        return [
            replace(item, used=float(self.streams[owner])) if item.quota is Quota.STREAMS else item
            for item in self._store.quotas.uses(owner, self._defaults)
        ]
