"""What is malformed is refused: never a failure of the server, never a trace in the database.

`make fuzz` sends twenty times as much.
"""

import asyncio
import errno
import json
import os
import random
import re
import socket
import sqlite3
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.app import create_app
from api.settings import Settings
from api.submission import JobSubmission, session_of_submission
from autotune.request.rows import request_to_row
from autotune.session.resolve import session_of
from search_spaces.outcome import JobState
from storage.records import Ask, Submission
from storage.store import Store
from tests.api.asgi import Answer, Raw, ask
from tests.api.conftest import REQUEST, measure
from tests.api.malformed import WIRE, Malformed, on_the_wire
from tests.api.test_docs import COMMAND, PAGE
from tests.ports import free_port

pytestmark = pytest.mark.fuzz

REQUESTS = max(3_000, 200 * int(os.environ.get("AUTOTUNE_FUZZ_EXAMPLES", "0")))
SEED = 20260101
OPENS_A_JOB = rb"POST /v1/jobs(/[^/ ]+/clone)? "
"""What else is answered by 202 steers a job that is there."""


class Watch:
    """Notices what is written to a database."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path)
        tables = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        self._tables = [name for (name,) in tables]
        self._version, self._rows = self._asked("PRAGMA data_version"), self._content()

    def has_changed(self) -> bool:
        """Whether anything was written since this was asked last."""
        # It changes with every commit of another connection: rows are looked at only then.
        version = self._asked("PRAGMA data_version")
        if version == self._version:
            return False
        before, self._rows, self._version = self._rows, self._content(), version
        return before != self._rows

    def close(self) -> None:
        self._connection.close()

    def _content(self) -> list[Any]:
        """How many rows each table has, and what jobs are. When a key was used last is not looked at."""
        counts = [self._asked(f"SELECT count(*) FROM {name}") for name in self._tables]
        return [counts, self._connection.execute("SELECT id, state, updated, event_count, request FROM jobs").fetchall()]

    def _asked(self, text: str) -> Any:
        return self._connection.execute(text).fetchone()[0]


@pytest.fixture
def jobs(store: Store) -> tuple[list[str], list[str]]:
    """Jobs of anna, which have ended, and one of ben."""
    found = []
    for owner in ("anna", "anna", "ben"):
        job = store.queue.submit(request_row(), Submission(submitter=owner, priority=0, key=None, body_hash=""))[0]
        measure(store, job.id)
        store.queue.ask(job.id, Ask.STOP)
        found.append(job.id)
    return found[:2], found[2:]


def request_row() -> dict[str, Any]:
    body = JobSubmission.model_validate(REQUEST)
    return request_to_row(session_of_submission(body, Settings(database_url="x"), 1000).request)


def keys_of(store: Store) -> list[bytes]:
    made = [store.keys.create("anna", {"read", "submit"})[1], store.keys.create("anna", {"read", "submit"})[1]]
    for key in made:
        store.keys.authenticate(key)  # when a key was used last is written down once a minute
    return [b"Bearer " + key.encode() for key in made]


def refused_well(kind: str, request: Raw, answer: Answer) -> None:
    """The answer is a refusal as all are: told by its status, in a problem document, without anything of the server."""
    told = (kind, request, answer.status, answer.body[:500])
    assert answer.status < 500, told
    if answer.status >= 400:
        assert answer.headers["content-type"] == "application/problem+json", told
        if request.method == "HEAD" and not answer.body:
            return
        document = json.loads(answer.body)
        assert document["status"] == answer.status, told
        assert len(answer.body) < 60_000, told
        assert b"Input should" not in answer.body and b"Value error" not in answer.body, told
        assert all(error["field"] and error["message"] and error["remedy"] for error in document.get("errors", ())), told
        assert b"Traceback" not in answer.body and b"root:" not in answer.body and b"site-packages" not in answer.body, told


@pytest.mark.nightly
def test_whatever_is_sent_is_answered(store: Store, database: str, jobs: tuple[list[str], list[str]]) -> None:
    malformed = Malformed(SEED, *jobs, keys_of(store))
    app = create_app(Settings(database_url=database))
    watch, statuses, accepted, slowest = Watch(database), Counter[int](), 0, 0.0

    async def run() -> None:
        nonlocal accepted, slowest
        for _ in range(REQUESTS):
            kind, request = malformed.next()
            began = time.process_time()
            answer = await ask(app, request)
            slowest = max(slowest, time.process_time() - began)
            refused_well(kind, request, answer)
            statuses[answer.status] += 1
            assert (answer.status < 300 and request.method == "POST") or not watch.has_changed(), (kind, request, answer)
            if answer.status == 202:
                assert request.method == "POST" and request.headers, request
                job = store.jobs.get(json.loads(answer.body)["id"])
                assert not session_of(job).space.is_empty(), "a job was accepted that no worker can read"
                assert (job.submitter, job.state) == ("anna", JobState.QUEUED)
                accepted += 1
                assert watch.has_changed()

    asyncio.run(run())
    watch.close()
    assert sum(statuses.values()) == REQUESTS
    assert {400, 401, 404, 405, 413, 415, 422} <= set(statuses), statuses
    assert sum(count for status, count in statuses.items() if status >= 400) > 0.7 * REQUESTS, statuses
    assert len(store.jobs.newest(limit=100_000)) == 3 + accepted
    assert slowest < 5.0


def said(port: int, text: bytes, leave: bool) -> bytes:
    """Send bytes, and return all that came back; `leave`: send no more, where a server would wait for it.

    Of a stream of events, which ends with its job, the first part is enough.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        try:
            connection.sendall(text)
            if leave:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while (part := connection.recv(65_536)) and b"content-type: text/event-stream" not in answer.lower():
                answer += part
            return answer
        except OSError as error:
            if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                raise
            return b""  # refused before all of it was read


@pytest.fixture
def served(tmp_path: Path, database: str) -> Iterator[int]:
    """The port of a real server, which has told of no failure when it ends."""
    port = free_port()
    environment = os.environ | {"AUTOTUNE_DB": database, "PYTHONPATH": str(PAGE.parents[1])}
    command = [*COMMAND, "serve", "--no-worker", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=log)
        try:
            until = time.monotonic() + 60
            while not alive(port):
                assert time.monotonic() < until and process.poll() is None
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            assert process.wait(60) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def alive(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.nightly
def test_whatever_comes_over_a_socket_is_answered(store: Store, jobs: tuple[list[str], list[str]], served: int) -> None:
    malformed, chance = Malformed(SEED, *jobs, keys_of(store)), random.Random(SEED)
    made = [malformed.next() for _ in range(400)]
    texts = [(text, True) for text in WIRE]
    texts += [(on_the_wire(request, chance.random() < 0.3), kind in ("lengths", "part_of_a_body")) for kind, request in made]
    statuses, opened = Counter[str](), 0
    for text, leave in texts:
        answer = said(served, text, leave)
        status = re.match(rb"HTTP/1\.1 (\d{3})", answer)
        statuses[status[1].decode() if status else "closed"] += 1
        opened += status is not None and status[1] == b"202" and re.match(OPENS_A_JOB, text) is not None
        assert status is None or status[1] < b"500", (text[:500], answer[:500])
    assert alive(served)
    assert statuses["closed"] < 0.2 * len(texts), statuses
    # No 413: while the client still sends, the answer may be lost with the connection.
    assert {"400", "404", "415", "421", "422"} <= set(statuses), statuses
    assert len(store.jobs.newest(limit=10_000)) == 3 + opened
