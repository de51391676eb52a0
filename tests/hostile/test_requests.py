"""Attacks by what requests carry, and by who reads a page: without a key, from another site, through a proxy."""

import re
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.hostile.ground import HEAVY, JOB, Finding, Row, ground

pytestmark = pytest.mark.hostile

FORWARDED = Finding(
    number=14, title="Forwarded requests", attack="requests of other people through a proxy; of another site's page; "
    "and guessed keys, each from an address of its own by `X-Forwarded-For`",
    before="without keys the service was open to whoever reached the proxy; each invented address had a rate of its own",
)  # fmt: skip
DOCS = Finding(
    number=15, title="Scripts from elsewhere", attack="whoever serves what `/docs` and `/redoc` load",
    before="both ran scripts of another host, under no policy",
)  # fmt: skip
ENDS = Finding(
    number=17, title="Streams at shutdown", attack="SIGTERM to a server while streams are open",
    before="closed without an end after 5 s, with a traceback for each",
)  # fmt: skip
STREAMS = 50 if HEAVY else 3


def test_nothing_is_believed_of_a_proxy_that_nobody_named(tmp_path: Path, sqlite: str, rows: list[Row]) -> None:
    with ground(tmp_path, sqlite) as here, here.client() as http:
        for header in ({"X-Forwarded-For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}, {"Via": "1.1 proxy"}):
            assert http.get("/v1/jobs", headers=header).status_code == httpx2.codes.FORBIDDEN
        assert http.post("/v1/jobs", json=JOB, headers={"Sec-Fetch-Site": "cross-site"}).status_code == httpx2.codes.FORBIDDEN
        assert http.post("/v1/jobs", json=JOB).status_code == httpx2.codes.ACCEPTED
        page = http.get("/docs")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert loaded and all(address.startswith("/page/") for address in loaded)
        assert http.get("/redoc").status_code == httpx2.codes.NOT_FOUND
    with ground(tmp_path, sqlite, keys=True, serve=("--requests-per-second", "2")) as here, here.client() as http:
        statuses = [
            http.get("/v1/jobs", headers={"Authorization": f"Bearer at_{n}_x", "X-Forwarded-For": f"203.0.113.{n}"}).status_code
            for n in range(200)
        ]
        assert statuses[-1] == httpx2.codes.TOO_MANY_REQUESTS
        tries = statuses.index(httpx2.codes.TOO_MANY_REQUESTS)
    after = f"403 without keys, and for pages of other sites; invented addresses are one: 429 after {tries} guesses"
    rows.append(Row(finding=FORWARDED, database="SQLite", after=after))
    rows.append(Row(finding=DOCS, database="SQLite", after="served here, under the page's policy; `/redoc` is gone"))


def test_streams_end_with_the_server(tmp_path: Path, sqlite: str, rows: list[Row]) -> None:
    """`ground` looks for tracebacks."""
    with ground(tmp_path, sqlite) as here, here.client() as http:
        job = http.post("/v1/jobs", json=JOB).json()["id"]
        address = urlsplit(here.url)
        streams = []
        for _ in range(STREAMS):
            stream = socket.create_connection((str(address.hostname), address.port or 80), timeout=60)
            stream.sendall(f"GET /v1/jobs/{job}/events/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            received = b""
            while b"job_created" not in received:
                received += stream.recv(65536)
            streams.append(stream)
        began = time.monotonic()
        here.server.send_signal(signal.SIGTERM)
        for stream in streams:
            received = b""
            while part := stream.recv(65536):
                received += part
            assert received.endswith(b"0\r\n\r\n")  # the end of an answer, not of a connection alone
            stream.close()
        assert here.server.wait(60) == 0
        seconds = time.monotonic() - began
    assert seconds < 5.0
    after = f"{STREAMS} streams end cleanly, and the server has exited after {seconds:.1f} s"
    rows.append(Row(finding=ENDS, database="SQLite", after=after))
