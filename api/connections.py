"""Limits connections: their number, and the time that each may take to send a request.

uvicorn closes only connections that are idle between two requests: one byte of a header keeps a connection, and its file
descriptor, open forever.

- A request's header must be complete within a time and a size limit. So must the TLS handshake, which begins after the
  connection is counted.
- A response that the client does not read is aborted.
- At the limit of an address or of the process, a new connection replaces the one for whose client the server has waited
  longest, beginning with those that have not sent a complete request. If the server waits for no client, every connection has a
  response in progress, and the new one is refused.
"""

import asyncio
import ipaddress
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.limits import network_of

log = logging.getLogger(__name__)


class Ended(StrEnum):
    """Why the server ended a connection."""

    HEADER_TIMEOUT = "header_timeout"
    """The header or the TLS handshake was not complete in time."""
    HEADER_TOO_LONG = "header_too_long"
    STALLED = "stalled"
    """The client did not read the response."""
    DISPLACED = "displaced"
    """The server waited for the client, and a newer connection took its place."""
    REFUSED = "refused"
    """The limit was reached, and every other connection had a response in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one process. For the addresses in `proxies`, which represent many clients, only `total` applies."""

    total: int = 1000
    per_address: int = 500
    """Per IPv4 address, or per 64-bit IPv6 network."""
    header_seconds: float = 10.0
    """For a request's header, counted from the start of the connection or the header's first byte, and for a TLS handshake."""
    stall_seconds: float = 30.0
    """A response is aborted if the client reads none of it for this long."""
    proxies: tuple[str, ...] = ()


class Connections:
    """The connections of one process. Used only in its event loop."""

    _LOG_SECONDS = 10.0
    """Least seconds between two log lines about ended connections."""

    _SWEEP_SECONDS = 1.0

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.ended: Counter[Ended] = Counter()
        """Counts since the process started."""
        self.on_shutdown: list[Callable[[], None]] = []
        """Callbacks that end open responses, such as streams."""
        self._proxies = [ipaddress.ip_network(proxy) for proxy in limits.proxies]
        self._open: dict[str, dict[BoundedProtocol, None]] = {}
        """Address -> its connections, in the order in which the server began to wait for their next request."""
        self._unlogged: Counter[tuple[Ended, str]] = Counter()
        self._logged = -self._LOG_SECONDS
        self._timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Number of open connections."""
        return sum(map(len, self._open.values()))

    def admit(self, connection: "BoundedProtocol") -> bool:
        """Give the connection a place, if necessary that of another one; False: no place is available."""
        mine = self._open.get(connection.address, {})
        full: Sequence[dict[BoundedProtocol, None]] = ()
        peer = connection.peer
        is_proxy = bool(peer) and any(ipaddress.ip_address(peer) in proxy for proxy in self._proxies)
        if len(mine) >= self.limits.per_address and not is_proxy:
            full = [mine]
        elif self.count >= self.limits.total:
            full = sorted(self._open.values(), key=len, reverse=True)  # the address with the most connections yields first
        if full:
            waiting = [other for group in full for other in group if other.is_waited_for]
            # Prefer connections without a complete request over idle ones that had a request before.
            longest = next((other for other in waiting if not other.has_asked), waiting[0] if waiting else None)
            if longest is None:
                self.note(Ended.REFUSED, connection.address)
                return False
            self.end(longest, Ended.DISPLACED)
        self._open.setdefault(connection.address, {})[connection] = None
        if self._timer is None:
            self._timer = connection.loop.call_later(self._SWEEP_SECONDS, self._sweep, connection.loop)
        return True

    def answered(self, connection: "BoundedProtocol") -> None:
        """Record that the server now waits for the connection's next request."""
        mine = self._open.get(connection.address, {})
        if connection in mine:
            del mine[connection]
            mine[connection] = None

    def end(self, connection: "BoundedProtocol", why: Ended) -> None:
        """Close the connection at once."""
        self.note(why, connection.address)
        self.release(connection)
        connection.abort()

    def release(self, connection: "BoundedProtocol") -> None:
        """Release the connection's place; has no effect if it was released before."""
        mine = self._open.get(connection.address, {})
        mine.pop(connection, None)
        if not mine:
            self._open.pop(connection.address, None)

    def note(self, why: Ended, address: str) -> None:
        """Count an ended connection, and log it together with others of the next seconds."""
        self.ended[why] += 1
        self._unlogged[why, address] += 1

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """End overdue connections once a second; a timer for each request would cost more."""
        now = loop.time()
        for connection in [connection for group in self._open.values() for connection in group]:
            why = connection.overdue(now)
            if why is not None:
                self.end(connection, why)
        if self._unlogged and now - self._logged >= self._LOG_SECONDS:
            self._logged = now
            log.warning("connections were ended: %s", _summary(self._unlogged))
            self._unlogged.clear()
        again = bool(self._open or self._unlogged)
        self._timer = loop.call_later(self._SWEEP_SECONDS, self._sweep, loop) if again else None


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol for connections that `Connections` limits.

    `app_state`, which the app's lifespan yields, contains them as `connections`. `config.tls` is the optional TLS context.
    """

    _MOST_HEADER_BYTES = 65_536

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.peer = self.address = ""
        """The client's address, and the address that is limited: for IPv6 the 64-bit network, which belongs to one machine."""
        self._places: Connections = app_state["connections"]
        self._tls: ssl.SSLContext | None = getattr(config, "tls", None)
        self._securing: asyncio.Task[None] | None = None
        self._socket: asyncio.Transport | None = None
        """None: the connection is closed."""
        self._heard: float | None = self.loop.time()
        """Start of the incomplete header or of the connection; None: no header is awaited, or none of it has arrived."""
        self._outside_bodies = 0
        """Bytes since a header began or ended or body data arrived: those of a header, of trailers, or between chunks."""
        self._is_read = False
        """Whether one of these events occurred in the current bytes."""
        self._speaks_http = False
        """False: the TLS handshake is in progress, or the connection was refused."""
        self._early = b""
        """Bytes that arrived with the end of the handshake, before the parser was ready."""
        self._beneath: asyncio.Transport | None = None
        """The transport below TLS; without TLS the only transport."""
        self._answering: RequestResponseCycle | None = None
        """The request whose response is in progress; further requests of the connection may wait behind it."""
        self._unsent, self._unsent_since = 0, 0.0

    @property
    def is_waited_for(self) -> bool:
        """Whether the server waits for the client, not the client for the server."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    @property
    def has_asked(self) -> bool:
        """Whether a complete request arrived, and no part of a further one since."""
        return self.cycle is not None and self._heard is None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, then begin the TLS handshake if TLS is used."""
        self._socket = self._beneath = transport
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self.address = network_of(self.peer)
        if not self._places.admit(self):
            self.abort()
        elif self._tls is None:
            self._begin(transport)
        else:
            transport.pause_reading()  # the first bytes belong to the handshake
            self._securing = self.loop.create_task(self._secure(transport, self._tls))

    async def _secure(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        seconds = self._places.limits.header_seconds
        try:
            secured = await self.loop.start_tls(transport, self, context, server_side=True, ssl_handshake_timeout=seconds)
        except OSError:  # not TLS, an untrusted certificate, or too slow: the client's problem
            secured = None
        if secured is None or self._socket is None:
            self._places.release(self)
            transport.abort()
            return
        self._socket, self._heard = secured, self.loop.time()
        self._begin(secured)

    def _begin(self, transport: asyncio.Transport) -> None:
        self._speaks_http = True
        super().connection_made(transport)
        if self._early:
            early, self._early = self._early, b""
            self.data_received(early)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the place."""
        self._places.release(self)
        self._socket = None
        if self._speaks_http:
            super().connection_lost(exc)
        answering = self._answering
        if answering is not None and not answering.response_complete:
            answering.disconnected = True  # uvicorn notifies only the newest request
            answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Record when a header begins, and count the bytes outside of bodies."""
        if self._socket is None:
            return
        if not self._speaks_http:
            self._early += data
            if len(self._early) > self._MOST_HEADER_BYTES:
                self._places.end(self, Ended.HEADER_TOO_LONG)
            return
        if self._heard is None and (self.cycle is None or self.cycle.response_complete):
            self._heard = self.loop.time()
        self._is_read = False
        super().data_received(data)
        self._outside_bodies = 0 if self._is_read else self._outside_bodies + len(data)
        if self._outside_bodies > self._MOST_HEADER_BYTES:
            self._places.end(self, Ended.HEADER_TOO_LONG)

    def on_message_begin(self) -> None:
        """Record that a header begins."""
        self._is_read = True
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Record that body data arrived."""
        self._is_read = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Start the request, unless too many are waiting."""
        self._heard, self._is_read = None, True
        # Requests that a client may send before it reads the responses.
        if len(self.pipeline) >= 16:
            raise httptools.HttpParserCallbackError("too many requests before their answers")
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._places.answered(self)
        super().on_response_complete()

    def shutdown(self) -> None:
        """End the streams when the server ends; nothing else ends them."""
        while self._places.on_shutdown:
            self._places.on_shutdown.pop()()
        if self._speaks_http:
            super().shutdown()
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once: discard unsent data, and skip TLS's closing handshake."""
        if self._socket is not None and self._beneath is not None:
            self._beneath.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def overdue(self, now: float) -> Ended | None:
        """The reason to end the connection; None: it may continue."""
        limits = self._places.limits
        if self._heard is not None and now - self._heard > limits.header_seconds:
            return Ended.HEADER_TIMEOUT
        unsent = 0
        if self._speaks_http and self._beneath is not None:
            unsent = self._beneath.get_write_buffer_size()
            if self._beneath is not self.transport:
                unsent += self.transport.get_write_buffer_size()
        if self._unsent == 0 or unsent < self._unsent:
            self._unsent_since = now
        self._unsent = unsent
        return Ended.STALLED if unsent and now - self._unsent_since > limits.stall_seconds else None


def _summary(ended: Counter[tuple[Ended, str]]) -> str:
    """`239 header_timeout (most from 10.0.0.1); 12 refused (most from 10.0.0.2)`."""
    parts = []
    for why in Ended:
        of = Counter({address: count for (reason, address), count in ended.items() if reason is why})
        if of:
            parts.append(f"{of.total()} {why} (most from {of.most_common(1)[0][0] or 'unknown'})")
    return "; ".join(parts)
