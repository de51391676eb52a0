"""Rate limits of clients."""

import hashlib
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

BURST_SECONDS = 10.0
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
        now, most = self._clock(), self._per_second * BURST_SECONDS
        tokens, then = self._clients.pop(client, (most, now))
        tokens = min(most, tokens + (now - then) * self._per_second)
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
