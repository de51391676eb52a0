"""A lightweight load generator: HTTP/1.1 over persistent connections, answers read as bytes.

Open loop: each request has a scheduled time, and waits for a free connection if there is none; its latency counts from that
time. So a stalling server does not receive fewer requests, and every delayed request counts.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

TICK_SECONDS = 0.002
CONNECTIONS = 32
GIVE_UP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Result of a load."""

    rate: float
    """Answers in a second."""
    seconds: tuple[float, ...]
    """Latency of each answer, sorted."""
    wrong: int
    """Requests answered with another status than expected, or not answered."""
    sample: bytes = b""
    """One of the wrong answers."""

    def percentile(self, share: float) -> float:
        """The latency, in seconds, that this share of the answers does not exceed."""
        return self.seconds[min(len(self.seconds) - 1, int(share * len(self.seconds)))] if self.seconds else float("inf")

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("inf")


class _Connection(asyncio.Protocol):
    """One persistent connection, with at most one request in flight."""

    def __init__(self, free: "deque[_Connection]", log: "_Log") -> None:
        self._free, self._log = free, log
        self._buffer = b""
        self._due = 0.0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes, due: float) -> None:
        assert self.transport is not None
        self._due = due
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._buffer) < end + 4 + length:
            return
        self._log.answered(head[9:12], time.perf_counter() - self._due, self._buffer)
        self._buffer = b""
        self._free.append(self)

    def connection_lost(self, _error: Exception | None) -> None:
        self.transport = None


class _Log:
    def __init__(self, expected: bytes) -> None:
        self._expected = expected
        self.seconds: list[float] = []
        self.wrong = 0
        self.sample = b""

    def answered(self, status: bytes, seconds: float, answer: bytes) -> None:
        if status != self._expected:
            self.wrong += 1
            self.sample = self.sample or answer[:2000]
        else:
            self.seconds.append(seconds)


Make = Callable[[int], bytes]


async def open_loop(port: int, make: Make, rate: float, seconds: float, expected: bytes) -> Latencies:
    """Send `make(0)`, `make(1)`, … at `rate` a second for `seconds`."""
    free, log = await _connected(port, CONNECTIONS, expected)
    waiting: deque[tuple[float, bytes]] = deque()
    everyone = list(free)
    began, sent, total = time.perf_counter(), 0, int(rate * seconds)
    until = began + seconds + GIVE_UP_SECONDS
    while len(log.seconds) + log.wrong < total and time.perf_counter() < until:
        now = time.perf_counter()
        while sent < total and began + sent / rate <= now:
            waiting.append((began + sent / rate, make(sent)))
            sent += 1
        while free and waiting:
            due, request = waiting.popleft()
            free.popleft().send(request, due)
        await asyncio.sleep(TICK_SECONDS)
    span = max(time.perf_counter() - began, seconds)
    return _closed(everyone, log, span, total)


async def closed_loop(port: int, make: Make, clients: int, seconds: float, expected: bytes) -> Latencies:
    """Run `clients` that send the next request as soon as they are answered: the server's maximum rate."""
    free, log = await _connected(port, clients, expected)
    everyone = list(free)
    began, sent = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        while free:
            free.popleft().send(make(sent), time.perf_counter())
            sent += 1
        await asyncio.sleep(0)
    done = len(log.seconds) + log.wrong
    return _closed(everyone, log, time.perf_counter() - began, done)


def request(method: str, path: str, headers: Sequence[str] = (), body: bytes = b"") -> bytes:
    """The bytes of an HTTP request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def _connected(port: int, count: int, expected: bytes) -> tuple[deque[_Connection], _Log]:
    free: deque[_Connection] = deque()
    log = _Log(expected)
    loop = asyncio.get_running_loop()
    for _ in range(count):
        _, connection = await loop.create_connection(lambda: _Connection(free, log), "127.0.0.1", port)
        free.append(connection)
    return free, log


def _closed(connections: Sequence[_Connection], log: _Log, span: float, total: int) -> Latencies:
    for connection in connections:
        if connection.transport is not None:
            connection.transport.abort()
    answered = len(log.seconds) + log.wrong
    return Latencies(
        rate=len(log.seconds) / span, seconds=tuple(sorted(log.seconds)), wrong=log.wrong + total - answered, sample=log.sample
    )
