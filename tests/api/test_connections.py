"""Connections of a real server: who says nothing is ended, and gives way to who asks; streams end when the server does."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import uvicorn

from api.app import create_app
from api.connections import ConnectionLimits, Connections, Ended
from api.settings import Settings
from autotune.cli.serve import ServeConfig
from storage.store import Store
from tests.api.conftest import REQUEST
from tests.certificates import self_signed

SECONDS = 15.0
PARTIAL = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
WHOLE = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


class Served:
    """A server in a thread of this process."""

    def __init__(self, server: uvicorn.Server, connections: Connections, port: int) -> None:
        self.server, self.connections, self.port = server, connections, port

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        connection.sendall(sent)
        return connection

    def ask(self) -> int:
        """The status of a request on a connection of its own."""
        with self.connect(WHOLE) as connection:
            return int(connection.recv(4096).split(b" ", 2)[1])


@contextmanager
def serving(database: str, tls: tuple[Path, Path] | None = None, **settings: object) -> Iterator[Served]:
    app = create_app(Settings(database_url=database, require_keys=False, **settings))  # type: ignore[arg-type]
    files = {} if tls is None else {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}
    config = ServeConfig(
        app,
        port=0,
        http="api.connections:BoundedProtocol",
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=5,
        **files,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    with patch("api.app.gc"):
        thread.start()
        until(lambda: server.started)
        try:
            connections = server.lifespan.state["connections"]
            yield Served(server, connections, server.servers[0].sockets[0].getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(SECONDS)
            assert not thread.is_alive()


def answer(connection: socket.socket) -> bytes:
    """The whole next answer: its head and its body may come apart."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1)
    length = int(received.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while length:
        part = connection.recv(length)
        received, length = received + part, length - len(part)
    return received


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes it; waits for that."""
    try:
        return connection.recv(4096) == b""
    except ConnectionError:
        return True


@pytest.mark.prove
def test_a_header_that_does_not_end_is_not_waited_for(database: str) -> None:
    """Neither where nothing comes, nor where a byte comes now and then."""
    with serving(database, header_seconds=0.2) as served, ExitStack() as stack:
        silent, slow = (stack.enter_context(served.connect(sent)) for sent in (b"", PARTIAL))
        again = stack.enter_context(served.connect(WHOLE))
        assert answer(again).startswith(b"HTTP/1.1 200")
        again.sendall(PARTIAL)
        with pytest.raises(OSError):
            while True:
                slow.sendall(b"a")
                time.sleep(0.02)
        assert is_closed(silent)
        assert is_closed(again)
        until(lambda: served.connections.ended[Ended.HEADER_TIMEOUT] == 3)


def test_a_header_is_bounded(database: str) -> None:
    with serving(database) as served, served.connect(PARTIAL) as connection:
        with pytest.raises(OSError):
            while True:
                connection.sendall(b"a" * 4096)
        until(lambda: served.connections.ended[Ended.HEADER_TOO_LONG] == 1)


@pytest.mark.prove
def test_what_follows_a_body_is_bounded(database: str) -> None:
    ask = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    for rest in (b"0\r\nX: ", b"1;x="):  # trailers, and what may be said of a chunk
        with serving(database) as served, served.connect(ask + rest) as connection:
            with pytest.raises(OSError):
                while True:
                    connection.sendall(b"a" * 4096)
            until(lambda: served.connections.ended[Ended.HEADER_TOO_LONG] == 1)


def test_a_header_behind_a_long_body_is_its_own(database: str) -> None:
    body = b"x" * 200_000
    ask = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(database) as served, served.connect(ask + body + WHOLE[:-2]) as connection:
        time.sleep(0.1)
        connection.sendall(WHOLE[-2:])
        assert answer(connection).startswith(b"HTTP/1.1 415")
        assert answer(connection).startswith(b"HTTP/1.1 200")


def test_a_stream_ends_when_its_client_leaves_though_a_request_waits_behind_it(database: str, store: Store) -> None:
    job = store.jobs.create(REQUEST)
    ask = f"GET /v1/jobs/{job.id}/events/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    # The server reads nothing beyond the request that waits: it learns of the end where it writes.
    with patch("api.hub.KEEPALIVE_SECONDS", 0.1), serving(database) as served:
        with served.connect(ask) as connection:
            received = b""
            while b"job_created" not in received:
                received += connection.recv(4096)
            connection.sendall(WHOLE)
            time.sleep(0.1)
            assert len(served.server.server_state.tasks) == 1
        until(lambda: not served.server.server_state.tasks)


def test_requests_ahead_of_their_answers_are_bounded(database: str) -> None:
    with serving(database) as served, served.connect(WHOLE * 500) as connection:
        received = b""
        while part := connection.recv(65536):
            received += part
        assert received.count(b"HTTP/1.1 200") < 50


@pytest.mark.prove
def test_whoever_says_nothing_gives_way_to_who_asks(database: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving(database, connections=100, connections_per_address=20) as served, ExitStack() as stack:
        regular = stack.enter_context(served.connect(WHOLE))
        slow = []
        for _ in range(60):
            assert answer(regular).startswith(b"HTTP/1.1 200")
            slow.append(stack.enter_context(served.connect(PARTIAL)))
            regular.sendall(WHOLE)
        assert [served.ask() for _ in range(5)] == [200] * 5
        assert is_closed(slow[0])  # the server waited for it longest
        assert answer(regular).startswith(b"HTTP/1.1 200")
        assert served.connections.count <= 20
        assert served.connections.ended[Ended.DISPLACED] >= 40
        until(lambda: "connections were ended" in caplog.text)
        assert "displaced (most from 127.0.0.1)" in caplog.text


def test_the_address_with_most_connections_gives_first() -> None:
    async def run() -> None:
        places = Connections(ConnectionLimits(total=4, per_address=4))
        loop = asyncio.get_running_loop()
        greedy = [Fake("10.0.0.1", loop) for _ in range(3)]
        for connection in (*greedy, other := Fake("10.0.0.2", loop)):
            assert places.admit(connection)
        greedy[0].is_waited_for = False  # its answer is on its way
        assert places.admit(Fake("10.0.0.3", loop))
        assert [connection.aborted for connection in (*greedy, other)] == [False, True, False, False]
        for connection in (*greedy, other):
            connection.is_waited_for = False
        assert places.admit(Fake("10.0.0.3", loop))  # instead of the one before from there
        for connection in [connection for group in places._open.values() for connection in group]:
            connection.is_waited_for = False  # type: ignore[misc]
        assert not places.admit(Fake("10.0.0.4", loop))
        assert places.ended == {Ended.DISPLACED: 2, Ended.REFUSED: 1}
        assert places._timer is not None
        places._timer.cancel()

    asyncio.run(run())


def test_a_trusted_proxy_speaks_for_many() -> None:
    async def run() -> list[bool]:
        places = Connections(ConnectionLimits(total=10, per_address=2, proxies=("10.1.0.0/16",)))
        loop = asyncio.get_running_loop()
        for address in ("10.1.0.7", "10.2.0.7"):
            for connection in [Fake(address, loop) for _ in range(4)]:
                connection.is_waited_for = False
                places.admit(connection)
        assert places._timer is not None
        places._timer.cancel()
        return [len(group) for group in places._open.values()]  # type: ignore[return-value]

    assert asyncio.run(run()) == [4, 2]


@pytest.mark.prove
def test_an_answer_that_nobody_reads_is_given_up(database: str) -> None:
    with serving(database, stall_seconds=0.2) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        ask = b"GET /page/vendor/echarts.mjs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        connection.sendall(ask * 10)  # some megabytes, more than the kernel takes
        until(lambda: served.connections.ended[Ended.STALLED] == 1)
        until(lambda: served.connections.count == 0)


def test_streams_end_with_the_server(database: str, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    job = store.jobs.create(REQUEST)
    ask = f"GET /v1/jobs/{job.id}/events/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    with ExitStack() as stack:
        with serving(database) as served:
            streams = [stack.enter_context(served.connect(ask)) for _ in range(3)]
            for stream in streams:
                received = b""
                while b"job_created" not in received:
                    received += stream.recv(4096)
            tasks = served.server.server_state.tasks
            assert len(tasks) == 3
        for stream in streams:
            assert stream.recv(4096).endswith(b"0\r\n\r\n")  # the end of a chunked answer, not a connection that breaks
    assert "Traceback" not in caplog.text
    assert "timeout graceful shutdown exceeded" not in caplog.text


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, signed by itself, and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_a_request_may_come_with_the_end_of_the_handshake(database: str, certificate: tuple[Path, Path]) -> None:
    with serving(database, certificate) as served, served.connect() as connection:
        coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
        secured = ssl.create_default_context(cafile=certificate[0]).wrap_bio(coming, going, server_hostname="127.0.0.1")
        while True:
            try:
                secured.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(going.read())
                coming.write(connection.recv(65536))
        secured.write(WHOLE)
        connection.sendall(going.read())  # both at once
        received = b""
        while b'{"status":"ok"}' not in received:
            try:
                received += secured.read(65536)
            except ssl.SSLWantReadError:
                part = connection.recv(65536)
                assert part, received
                coming.write(part)


@pytest.mark.prove
def test_an_answer_over_tls_that_nobody_reads_is_given_up(database: str, certificate: tuple[Path, Path]) -> None:
    with serving(database, certificate, stall_seconds=0.2) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        context = ssl.create_default_context(cafile=certificate[0])
        with context.wrap_socket(connection, server_hostname="127.0.0.1") as secured:
            secured.sendall(b"GET /page/vendor/echarts.mjs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 10)
            until(lambda: served.connections.ended[Ended.STALLED] == 1)
            until(lambda: served.connections.count == 0)


def test_tls_begins_after_the_connection_is_counted(database: str, certificate: tuple[Path, Path]) -> None:
    with serving(database, certificate, header_seconds=0.3, connections_per_address=20) as served, ExitStack() as stack:
        context = ssl.create_default_context(cafile=certificate[0])
        silent = [stack.enter_context(served.connect()) for _ in range(30)]
        with context.wrap_socket(served.connect(), server_hostname="127.0.0.1") as secured:
            secured.sendall(WHOLE)
            received = b""
            while b'{"status":"ok"}' not in received:
                part = secured.recv(4096)
                assert part, received
                received += part
        assert all(map(is_closed, silent))
        assert served.connections.ended[Ended.DISPLACED] >= 11
        until(lambda: served.connections.count == 0)


class Fake:
    """What `Connections` knows of a connection."""

    def __init__(self, peer: str, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = self.address = peer
        self.loop, self.is_waited_for, self.has_asked, self.aborted = loop, True, False, False

    def abort(self) -> None:
        self.aborted = True
