"""Attacks with nothing but connections, lists and streams."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage.records import Submission
from storage.store import open_store
from tests.hostile.ground import HEAVY, JOB, Finding, Row, ground

pytestmark = pytest.mark.hostile

PARTIAL = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
HEADERS = Finding(
    number=3, title="Partial request headers", attack="239 sockets that send a header byte by byte, and open again when closed",
    before="with 256 descriptors, 239 such sockets shut everyone out for as long as they liked",
)  # fmt: skip
LISTS = Finding(
    number=4, title="Lists of whole requests", attack="150 jobs of 0.95 MB, six clients that list them again and again",
    before="136 MB an answer, 2.8 GB of memory for six at once",
)  # fmt: skip
STREAMS = Finding(
    number=5, title="Streams", attack="one owner opens as many streams as it can, and all their jobs change at once",
    before="streams without a limit; with 1,000 changed jobs all streams on SQLite stopped for ever",
)  # fmt: skip


def attack_headers(url: str, count: int, seconds: float) -> int:
    """Keep so many connections with an incomplete header open. Returns how many were opened."""
    address = urlsplit(url)
    until = time.monotonic() + seconds
    sockets: list[socket.socket] = []
    opened = 0
    with contextlib.ExitStack() as stack:
        while time.monotonic() < until:
            while len(sockets) < count:
                with contextlib.suppress(OSError):
                    one = stack.enter_context(socket.create_connection((str(address.hostname), address.port or 80), timeout=10))
                    one.sendall(PARTIAL)
                    sockets.append(one)
                    opened += 1
            for one in [*sockets]:
                try:
                    one.sendall(b"a")
                except OSError:
                    sockets.remove(one)
                    one.close()
            time.sleep(0.2)
    return opened


def test_partial_headers_shut_nobody_out(tmp_path: Path, rows: list[Row]) -> None:
    limits = ("--connections", "128", "--connections-per-address", "64", "--header-seconds", "2")
    with ground(tmp_path, serve=limits) as here:
        with here.normal_client() as client:
            opened = attack_headers(here.url, 239, 30.0 if HEAVY else 3.0)
        usage = here.usage()
        assert usage.descriptors < 256
        assert "displaced (most from 127.0.0.1)" in here.log()
        client.require_served()
    after = f"{opened} connections, of which 64 had a place at a time; the others gave way to whoever asked"
    rows.append(Row(finding=HEADERS, database=here.kind, after=after, client=client, usage=usage))


def test_lists_stay_small(tmp_path: Path, database: str, rows: list[Row]) -> None:
    count, seconds = (150, 20.0) if HEAVY else (30, 2.0)
    sizes: list[int] = []
    with ground(tmp_path, database) as here:
        with open_store(database) as store:
            for _ in range(count):
                store.queue.submit(JOB | {"pins": {"x": "x" * 950_000}}, Submission())
        until = time.monotonic() + seconds

        def ask() -> None:
            with here.client() as http:
                while time.monotonic() < until:
                    sizes.append(len(http.get("/v1/jobs?limit=150").content))
                    time.sleep(0.05)

        with here.normal_client() as client:
            threads = [threading.Thread(target=ask) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        usage = here.usage()
        client.require_served()
    assert sizes and max(sizes) < 200_000
    after = f"{max(sizes) / 1e3:.0f} kB an answer, {len(sizes) / seconds:.0f} answers/s"
    rows.append(Row(finding=LISTS, database=here.kind, after=after, client=client, usage=usage))


def test_streams_are_bounded_and_go_on(tmp_path: Path, database: str, rows: list[Row]) -> None:
    most, wanted = (256, 300) if HEAVY else (20, 25)
    with ground(tmp_path, database, keys=True, serve=("--quota", f"streams={most}")) as here, contextlib.ExitStack() as stack:
        http = stack.enter_context(here.client(here.key("mallory")))
        with open_store(database) as store:
            jobs = [store.queue.submit(JOB, Submission(submitter="mallory"))[0].id for _ in range(wanted)]
        address = urlsplit(here.url)
        with here.normal_client() as client:
            streams, refused = [], 0
            for job in jobs:
                stream = stack.enter_context(socket.create_connection((str(address.hostname), address.port or 80), timeout=60))
                key = http.headers["authorization"]
                ask = f"GET /v1/jobs/{job}/events/stream HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n\r\n"
                stream.sendall(ask.encode())
                status = int(stream.recv(12, socket.MSG_WAITALL).split(b" ")[1])
                if status == 200:
                    streams.append((job, stream))
                else:
                    assert status == 429
                    refused += 1
            for job, _ in streams:
                assert http.post(f"/v1/jobs/{job}/cancel").status_code == 202
            for _, stream in streams:
                received = b""
                while b"job_asked" not in received:
                    part = stream.recv(65536)
                    assert part, received
                    received += part
            ready = json.loads(http.get("/readyz").content)
        usage = here.usage()
        client.require_served()
    assert (len(streams), refused) == (most, wanted - most)
    assert ready["streams"] == "ok"
    after = f"{most} streams of an owner, {refused} refused with 429; each got its events"
    rows.append(Row(finding=STREAMS, database=here.kind, after=after, client=client, usage=usage))
