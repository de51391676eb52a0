"""The frame of the attacks: what it reports is what happened."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.hostile.ground import JOB, Finding, NormalClient, Row, ground, page

pytestmark = pytest.mark.hostile


def test_a_normal_client_is_served_where_nobody_attacks(tmp_path: Path, database: str) -> None:
    with ground(tmp_path, database, keys=True, workers=1) as here:
        with here.normal_client() as client, here.client(here.key("anna")) as http:
            job = http.post("/v1/jobs", json=JOB).json()["id"]
            limit = time.monotonic() + 60
            while http.get(f"/v1/jobs/{job}").json()["state"] != "SUCCEEDED":
                assert time.monotonic() < limit
                time.sleep(0.05)
        client.require_served()
        usage = here.usage()
    assert 0 < usage.rss_bytes <= usage.peak_rss_bytes
    assert usage.descriptors > 5 and usage.threads > 1


def test_a_server_that_stops_for_a_second_is_seen(tmp_path: Path, sqlite: str) -> None:
    """However rarely a client asks: what was due meanwhile counts from when it was due."""
    with ground(tmp_path, sqlite) as here, here.normal_client() as client:
        os.kill(here.server.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(here.server.pid, signal.SIGCONT)
    assert client.readings["livez"]["p99"] > 0.8
    assert client.readings["livez"]["count"] > 5


def test_the_page_has_a_line_for_each_finding() -> None:
    finding = Finding(number=3, title="Sockets", attack="239 of them", before="everyone was shut out")
    reading = {"count": 10, "failed": 0, "refused": 0, "median": 0.001, "p99": 0.002, "worst": 0.003}
    client = NormalClient(readings=dict.fromkeys(("list", "job", "livez"), reading))
    rows = [
        Row(finding=finding, database="SQLite", after="408 after 10 s", client=client),
        Row(finding=finding, database="PostgreSQL", after="408 after 10 s"),
    ]
    text = page(rows)
    assert "| 3. Sockets | 239 of them | everyone was shut out | 408 after 10 s |" in text
    assert "| 3. Sockets | SQLite | 2 | 2 | 3 | – | – | – |" in text
