"""Connections, bounded: how many there are, and how long each may take to say what it wants.

uvicorn ends a connection that is idle between two requests, and nothing else: one byte of a header keeps it open for ever, and
each takes a descriptor.

- A request's header must be complete within a time and a size. So must the TLS handshake, which begins after a connection is
  counted.
- An answer that a client does not read is given up.
- At the limit of an address, or of the process, a new connection takes the place of the one for whose client the server has
  waited longest, first of those that have sent no whole request. It is refused where there is none: every place then belongs to
  a request that is being answered.
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

from api.rates import network_of

SWEEP_SECONDS = 1.0
LOG_SECONDS = 10.0
"""Between two lines that say which connections were ended."""
MOST_HEADER_BYTES = 65_536
MOST_PIPELINED = 16
"""Requests that a client may send ahead of their answers."""
log = logging.getLogger(__name__)


class Ended(StrEnum):
    """Why the server ended a connection."""

    HEADER_TIMEOUT = "header_timeout"
    """No whole header came in time, or no TLS handshake."""
    HEADER_TOO_LONG = "header_too_long"
    STALLED = "stalled"
    """Its client did not read the answer."""
    DISPLACED = "displaced"
    """The server waited for its client, and a newer connection took its place."""
    REFUSED = "refused"
    """There was no place, and every other connection was being answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Of one process. Of the addresses of `proxies`, which speak for many clients, only `total` holds."""

    total: int = 1000
    per_address: int = 500
    """Of one IPv4 address, or one IPv6 network of 64 bits."""
    header_seconds: float = 10.0
    """For a request's header, from the opening of the connection or the header's first byte on, and for a TLS handshake."""
    stall_seconds: float = 30.0
    """After which an answer is given up of which the client has read nothing meanwhile."""
    proxies: tuple[str, ...] = ()


class Connections:
    """The connections of one process. Used in its event loop alone."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.ended: Counter[Ended] = Counter()
        """Since the process began."""
        self.on_shutdown: list[Callable[[], None]] = []
        """What ends answers that would go on, such as streams."""
        self._proxies = [ipaddress.ip_network(proxy) for proxy in limits.proxies]
        self._open: dict[str, dict[BoundedProtocol, None]] = {}
        """Address -> its connections, in the order in which the server began to wait for a request of theirs."""
        self._unlogged: Counter[tuple[Ended, str]] = Counter()
        self._logged = -LOG_SECONDS
        self._timer: asyncio.TimerHandle | None = None

    @property
    def count(self) -> int:
        """Connections that are open."""
        return sum(map(len, self._open.values()))

    def admit(self, connection: "BoundedProtocol") -> bool:
        """Give the connection a place, another one's if need be; False: there is none."""
        mine = self._open.get(connection.address, {})
        full: Sequence[dict[BoundedProtocol, None]] = ()
        if len(mine) >= self.limits.per_address and not self._is_proxy(connection.peer):
            full = [mine]
        elif self.count >= self.limits.total:
            full = sorted(self._open.values(), key=len, reverse=True)  # whoever has most gives first
        if full:
            waiting = [other for group in full for other in group if other.is_waited_for]
            # Who has asked before and idles gives way after those who have said nothing whole.
            longest = next((other for other in waiting if not other.has_asked), waiting[0] if waiting else None)
            if longest is None:
                self.note(Ended.REFUSED, connection.address)
                return False
            self.end(longest, Ended.DISPLACED)
        self._open.setdefault(connection.address, {})[connection] = None
        if self._timer is None:
            self._timer = connection.loop.call_later(SWEEP_SECONDS, self._sweep, connection.loop)
        return True

    def answered(self, connection: "BoundedProtocol") -> None:
        """From now on the server waits for its next request."""
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
        """Give up its place; nothing, if that was done before."""
        mine = self._open.get(connection.address, {})
        mine.pop(connection, None)
        if not mine:
            self._open.pop(connection.address, None)

    def note(self, why: Ended, address: str) -> None:
        """Count, and log with others of the next seconds, that a connection was ended."""
        self.ended[why] += 1
        self._unlogged[why, address] += 1

    def shut_down(self) -> None:
        """End what would go on."""
        while self.on_shutdown:
            self.on_shutdown.pop()()

    def _is_proxy(self, peer: str) -> bool:
        return bool(peer) and any(ipaddress.ip_address(peer) in proxy for proxy in self._proxies)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Once a second: to set a timer for each request would cost more."""
        now = loop.time()
        for connection in [connection for group in self._open.values() for connection in group]:
            why = connection.overdue(now)
            if why is not None:
                self.end(connection, why)
        if self._unlogged and now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.warning("connections were ended: %s", _summary(self._unlogged))
            self._unlogged.clear()
        again = bool(self._open or self._unlogged)
        self._timer = loop.call_later(SWEEP_SECONDS, self._sweep, loop) if again else None


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, for connections that have a place among `Connections`.

    `app_state`, what the app's lifespan yields, has these as `connections`. `config.tls` is the TLS context, if there is one.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.peer = self.address = ""
        """The client's address, and what of it has places: an IPv6 network of 64 bits belongs to one machine."""
        self._places: Connections = app_state["connections"]
        self._tls: ssl.SSLContext | None = getattr(config, "tls", None)
        self._securing: asyncio.Task[None] | None = None
        self._socket: asyncio.Transport | None = None
        """None: it is closed."""
        self._heard: float | None = self.loop.time()
        """When the incomplete header began, or the connection; None: no header is awaited, or nothing of it is there."""
        self._outside_bodies = 0
        """Bytes that came since a header began or ended, or a part of a body came: of a header, of trailers, between chunks."""
        self._is_read = False
        """Whether one of these came in the bytes that are being read."""
        self._speaks_http = False
        """False: its TLS handshake is under way, or it was given no place."""
        self._early = b""
        """What came with the end of the handshake, before anybody could read it."""
        self._beneath: asyncio.Transport | None = None
        """The transport under that of TLS, where there is one, and else the only one."""
        self._answering: RequestResponseCycle | None = None
        """The request that is being answered: others of the connection may wait behind it."""
        self._unsent, self._unsent_since = 0, 0.0

    @property
    def is_waited_for(self) -> bool:
        """Whether the server waits for the client, and not the other way around."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    @property
    def has_asked(self) -> bool:
        """Whether a request came, and nothing of a further one since."""
        return self.cycle is not None and self._heard is None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place; then the handshake of TLS, if there is to be one."""
        self._socket = self._beneath = transport
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self.address = network_of(self.peer)
        if not self._places.admit(self):
            self.abort()
        elif self._tls is None:
            self._begin(transport)
        else:
            transport.pause_reading()  # the first bytes are of the handshake
            self._securing = self.loop.create_task(self._secure(transport, self._tls))

    async def _secure(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        seconds = self._places.limits.header_seconds
        try:
            secured = await self.loop.start_tls(transport, self, context, server_side=True, ssl_handshake_timeout=seconds)
        except OSError:  # no TLS, a certificate that the client does not trust, too slow: its affair
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
        """Give the place up."""
        self._places.release(self)
        self._socket = None
        if self._speaks_http:
            super().connection_lost(exc)
        answering = self._answering
        if answering is not None and not answering.response_complete:
            answering.disconnected = True  # uvicorn tells the newest request alone
            answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Note when a header begins, and how much comes that is of no body."""
        if self._socket is None:
            return
        if not self._speaks_http:
            self._early += data
            if len(self._early) > MOST_HEADER_BYTES:
                self._places.end(self, Ended.HEADER_TOO_LONG)
            return
        if self._heard is None and (self.cycle is None or self.cycle.response_complete):
            self._heard = self.loop.time()
        self._is_read = False
        super().data_received(data)
        self._outside_bodies = 0 if self._is_read else self._outside_bodies + len(data)
        if self._outside_bodies > MOST_HEADER_BYTES:
            self._places.end(self, Ended.HEADER_TOO_LONG)

    def on_message_begin(self) -> None:
        """A header begins."""
        self._is_read = True
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """A part of a body is there."""
        self._is_read = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Begin the request, unless too many wait before it."""
        self._heard, self._is_read = None, True
        if len(self.pipeline) >= MOST_PIPELINED:
            raise httptools.HttpParserCallbackError("too many requests before their answers")
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._places.answered(self)
        super().on_response_complete()

    def shutdown(self) -> None:
        """The server ends: so do its streams, which nobody else ends."""
        self._places.shut_down()
        if self._speaks_http:
            super().shutdown()
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once, whatever is unsent, without the farewell of TLS."""
        if self._socket is not None and self._beneath is not None:
            self._beneath.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def overdue(self, now: float) -> Ended | None:
        """Why the connection should be ended; None: it may go on."""
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
