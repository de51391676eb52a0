"""Minutes of mixed hostile and normal traffic, and what two servers and two workers hold meanwhile.

What is watched in each process: resident memory, descriptors, threads, and connections to the database. After a first part, in
which pools and caches fill, nothing may grow. In the end every job has ended, and no log has a traceback (`ground` looks).
"""

import contextlib
import http.server
import json
import random
import socket
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from sqlalchemy import create_engine, text

from storage.store import open_store
from tests.hostile.ground import JOB, NodePool, _process, _usage, ground
from tests.ports import free_port

SAMPLE_SECONDS = 1.0
WARM_UP = 0.4
"""Share of the time in which pools and caches fill."""
MOST_GROWTH: Mapping[str, float] = {"rss_bytes": 12e6, "descriptors": 12, "threads": 6, "connections": 3}
"""By how much the median of the last part may be above that of the part after the warm-up."""
OPEN = ("QUEUED", "RUNNING", "PAUSING", "STOPPING", "CANCELLING", "PAUSED")
END_SECONDS = 300.0
MOST_WAITING = 10
"""Jobs in the queue beyond which normal clients submit none."""
SMALL = {**JOB, "trials": 2, "strategy": "random", "control_every": 0, "confirm_repeats": 0}


@dataclass(slots=True, kw_only=True)
class Endured:
    """What happened."""

    database: str
    minutes: float
    samples: Mapping[str, Sequence[Mapping[str, float]]] = field(default_factory=dict)
    """Process -> what it held, in order of time."""
    asked: Counter[str] = field(default_factory=Counter)
    """Kind of traffic and status -> answers."""
    unexpected: list[str] = field(default_factory=list)
    jobs: Counter[str] = field(default_factory=Counter)
    """State -> jobs in the end."""

    def parts(self, process: str, figure: str) -> tuple[float, float]:
        """Medians of a figure after the warm-up, and at the end."""
        values = [sample[figure] for sample in self.samples[process]]
        warm = values[int(len(values) * WARM_UP) :]
        third = max(1, len(warm) // 3)
        return statistics.median(warm[:third]), statistics.median(warm[-third:])

    def series(self, process: str, figure: str) -> list[float]:
        """Medians of each tenth of the time."""
        values = [sample[figure] for sample in self.samples[process]]
        tenth = max(1, len(values) // 10)
        return [statistics.median(values[start : start + tenth]) for start in range(0, len(values) - tenth + 1, tenth)]

    def growth(self) -> list[str]:
        """What grew by more than it may, a line each."""
        found = []
        for process in self.samples:
            for figure, most in MOST_GROWTH.items():
                first, last = self.parts(process, figure)
                if last - first > most:
                    found.append(f"{process}: {figure} grew from {first:,.0f} to {last:,.0f}")
        return found


def endure(folder: Path, database: str, minutes: float) -> Endured:
    """Run the traffic for so long, and wait until every job has ended."""
    found = Endured(database="PostgreSQL" if database.startswith("postgres") else "SQLite", minutes=minutes)
    serve = ("--webhook-network", "127.0.0.0/8")
    with ExitStack() as stack:
        receiver = stack.enter_context(receivers())
        here = stack.enter_context(ground(folder, database, keys=True, workers=2, serve=serve, seconds_per_trial=0.02))
        second, process = stack.enter_context(_second_server(here, serve))
        urls = (here.url, second)
        watched = {"server 1": here.server.pid, "server 2": process.pid}
        watched |= {f"worker {number}": worker.pid for number, worker in enumerate(here.workers, 1)}
        stop = threading.Event()
        samples: dict[str, list[Mapping[str, float]]] = {name: [] for name in watched}
        keys = {owner: here.key(owner) for owner in ("anna", "bert", "mallory")}
        traffic = _Traffic(found, urls, keys, stop, receiver)
        threads = [threading.Thread(target=traffic.repeat, args=(kind,)) for kind in traffic.kinds()]
        threads.append(threading.Thread(target=_sample, args=(database, watched, samples, stop)))
        try:
            for thread in threads:
                thread.start()
            stop.wait(minutes * 30)
            _damage(database)
            stop.wait(minutes * 30)
        finally:
            stop.set()
        for thread in threads:
            thread.join()
        found.samples = samples
        found.jobs = _ended(here)
        assert process.poll() is None and here.server.poll() is None, "a server has ended"
        assert all(worker.poll() is None for worker in here.workers), "a worker has ended"
    return found


@contextmanager
def _second_server(here: NodePool, serve: Sequence[object]) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Another API process on the same database."""
    port = free_port()
    variables = here.variables
    command = ["serve", "--no-worker", "--port", str(port), "--keys", *map(str, serve)]
    with _process(command, here.folder, "server2", variables) as process:
        url = f"http://127.0.0.1:{port}"
        limit = time.monotonic() + 120
        while True:
            with contextlib.suppress(httpx2.TransportError):
                if httpx2.get(f"{url}/readyz", trust_env=False).status_code == httpx2.codes.OK:
                    break
            assert time.monotonic() < limit
            time.sleep(0.1)
        yield url, process


class _Traffic:
    """Normal and hostile clients, each a thread with a connection of its own."""

    def __init__(
        self, found: Endured, urls: Sequence[str], keys: Mapping[str, str], stop: threading.Event, receiver: Mapping[str, str]
    ) -> None:
        self._found, self._urls, self._keys, self._stop, self._receiver = found, urls, keys, stop, receiver
        self._lock = threading.Lock()

    def kinds(self) -> list[Callable[[httpx2.Client, random.Random], None]]:
        """What each thread repeats: two normal ones, and the attacks."""
        return [
            self.normal, self.normal, self.stream, self.broken_bodies, self.patterns, self.half_requests, self.guesses,
            self.webhooks, self.large_lists,
        ]  # fmt: skip

    def repeat(self, kind: Callable[[httpx2.Client, random.Random], None]) -> None:
        """Until it is over; what is not expected of an answer is written down."""
        name, chance = kind.__name__, random.Random(kind.__name__)
        owner = "anna" if kind in (self.normal, self.stream) else "mallory"
        while not self._stop.is_set():
            headers = {"Authorization": f"Bearer {self._keys[owner]}"}
            with httpx2.Client(base_url=chance.choice(self._urls), headers=headers, timeout=60.0, trust_env=False) as http:
                for _ in range(20):
                    if self._stop.is_set():
                        return
                    try:
                        kind(http, chance)
                    except httpx2.HTTPError as error:
                        self._note(name, type(error).__name__)
                        break
                    self._stop.wait(0.05)

    def _note(self, kind: str, status: object) -> None:
        with self._lock:
            self._found.asked[f"{kind} {status}"] += 1
            if status in (500, 502) or (kind == "normal" and not isinstance(status, int)):
                self._found.unexpected.append(f"{kind}: {status}")

    def _ask(self, kind: str, answer: httpx2.Response) -> httpx2.Response:
        self._note(kind, answer.status_code)
        return answer

    def normal(self, http: httpx2.Client, chance: random.Random) -> None:
        """Submits, looks, and cancels or clones at times."""
        waiting = self._ask("normal", http.get("/v1/jobs", params={"state": "QUEUED", "limit": MOST_WAITING}))
        if waiting.status_code == httpx2.codes.OK and len(waiting.json()["items"]) == MOST_WAITING:
            self._stop.wait(1.0)  # the workers come first: what waits in the end is waited for
            return
        made = self._ask("normal", http.post("/v1/jobs", json=SMALL | {"seed": chance.randrange(3)}))
        listed = self._ask("normal", http.get("/v1/jobs", params={"limit": 20}))
        if made.status_code == httpx2.codes.ACCEPTED:
            job = made.json()["id"]
            self._ask("normal", http.get(f"/v1/jobs/{job}"))
            self._ask("normal", http.get("/v1/overviews", params={"job": job}))
            if chance.random() < 0.3:
                self._ask("normal", http.post(f"/v1/jobs/{job}/{chance.choice(['cancel', 'clone', 'stop'])}"))
        if listed.status_code == httpx2.codes.OK and (items := listed.json()["items"]):
            self._ask("normal", http.get(f"/v1/jobs/{chance.choice(items)['id']}/trials"))
        self._stop.wait(0.5)

    def stream(self, http: httpx2.Client, chance: random.Random) -> None:
        """Follows a job for a moment, and leaves."""
        items = http.get("/v1/jobs", params={"limit": 5}).json().get("items", [])
        if not items:
            return
        with http.stream("GET", f"/v1/jobs/{chance.choice(items)['id']}/events/stream") as answer:
            self._note("stream", answer.status_code)
            for number, _ in enumerate(answer.iter_lines()):
                if number > 20 or self._stop.is_set():
                    return

    def broken_bodies(self, http: httpx2.Client, chance: random.Random) -> None:
        """Bodies that are no requests: no JSON, nested, large, of wrong kinds."""
        body = chance.choice([
            b"{", b"[" * 900_000, b'{"model":' * 2000, b"\xff" * 1000, b"x" * 1_200_000, b'{"trials":1e999}',
            json.dumps(SMALL | {"pins": {"zero_stage": [0] * 200}}).encode(),
            json.dumps(SMALL | {"note": "x" * 900_000}).encode(),
            json.dumps(SMALL | {"document_lengths": [10**9] * 1000}).encode(), b'{"seed":' + b"9" * 5000 + b"}",
        ])  # fmt: skip
        self._ask("broken bodies", http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"}))

    def patterns(self, http: httpx2.Client, chance: random.Random) -> None:
        """Patterns that a backtracking engine never ends with."""
        rows = {
            f"row{number}": {"outcome": "FAILED", "remedy": "x", "output": [rf"(?:(?:.|.)*)*\x01{number}", "(a+)+$"]}
            for number in range(chance.randrange(1, 60))
        }
        made = self._ask("patterns", http.post("/v1/jobs", json=SMALL | {"failures": rows}))
        if made.status_code == httpx2.codes.ACCEPTED and chance.random() < 0.9:
            self._ask("patterns", http.post(f"/v1/jobs/{made.json()['id']}/cancel"))
        self._stop.wait(1.0)

    def half_requests(self, _http: httpx2.Client, chance: random.Random) -> None:
        """Connections that begin a request, and leave or wait."""
        host, _, port = chance.choice(self._urls).removeprefix("http://").partition(":")
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for _ in range(10):
                there = stack.enter_context(socket.create_connection((host, int(port)), 10.0))
                there.sendall(
                    chance.choice([b"GET / HTTP/1.1\r\nHost: x\r\n", b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"])
                )
            self._note("half requests", "left open")
            self._stop.wait(1.0)

    def guesses(self, _http: httpx2.Client, chance: random.Random) -> None:
        """Keys that are none, and other people's jobs."""
        headers = {"Authorization": f"Bearer at_{chance.randrange(10**9)}_{'x' * 40}"}
        with httpx2.Client(base_url=chance.choice(self._urls), headers=headers, timeout=60.0, trust_env=False) as http:
            self._ask("guesses", http.get("/v1/jobs"))
        self._ask("guesses", _http.get("/v1/jobs/20260101-000000-aaaa"))

    def webhooks(self, http: httpx2.Client, chance: random.Random) -> None:
        """Receivers that do not answer, refuse, or are where nobody may call; and jobs that end for them."""
        url = chance.choice([*self._receiver.values(), "http://169.254.169.254/", "http://168.63.129.16/", "http://[::1]:1/"])
        made = self._ask("webhooks", http.post("/v1/webhooks", json={"url": url}))
        job = self._ask("webhooks", http.post("/v1/jobs", json=SMALL))
        if job.status_code == httpx2.codes.ACCEPTED:
            self._ask("webhooks", http.post(f"/v1/jobs/{job.json()['id']}/cancel"))
        if made.status_code == httpx2.codes.CREATED and chance.random() < 0.8:
            self._ask("webhooks", http.delete(f"/v1/webhooks/{made.json()['id']}"))
        self._stop.wait(0.5)

    def large_lists(self, http: httpx2.Client, chance: random.Random) -> None:
        """Long lists, odd parameters."""
        path = chance.choice([
            "/v1/jobs?limit=1000", "/v1/jobs?limit=99999", "/v1/jobs?tag=%00", "/v1/jobs?cursor=x", "/metrics", "/docs",
            "/v1/jobs?" + "&".join(["state=QUEUED"] * 50), "/v1/../../etc/passwd", "/openapi.json",
        ])  # fmt: skip
        self._ask("large lists", http.get(path))


def _sample(
    database: str, watched: Mapping[str, int], samples: Mapping[str, list[Mapping[str, float]]], stop: threading.Event
) -> None:
    engine = create_engine(database.replace("postgresql:", "postgresql+psycopg:"))
    try:
        while not stop.wait(SAMPLE_SECONDS):
            for name, pid in watched.items():
                held = _usage(pid)
                if held is not None:
                    figures = {"rss_bytes": held.rss_bytes, "descriptors": held.descriptors, "threads": held.threads}
                    samples[name].append(figures | {"connections": _connections(engine, database, pid)})
    finally:
        engine.dispose()


def _connections(engine: Any, database: str, pid: int) -> int:
    """Of a process to the database: files of SQLite that it has open, or its sockets as the server counts them."""
    if database.startswith("sqlite"):
        name = database.removeprefix("sqlite:///")
        found = 0
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                found += str(path.readlink()) == name
        return found
    with engine.connect() as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        return int(connection.execute(text(query)).scalar() or 0)


def _damage(database: str) -> None:
    """One value of the oldest ended job, as a disk may leave it: nobody else may notice."""
    # SQLite lets whoever asks at the right moment write: beside four busy processes that takes longer than its 5 s.
    waits = {"timeout": 120} if database.startswith("sqlite") else {}
    engine = create_engine(database.replace("postgresql:", "postgresql+psycopg:"), connect_args=waits)
    ended = "SELECT id FROM jobs WHERE state IN ('SUCCEEDED', 'CANCELLED') ORDER BY created, id LIMIT 1"
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE jobs SET request = '[1]' WHERE id = ({ended})"))
    engine.dispose()


def _ended(here: NodePool) -> Counter[str]:
    """The jobs by state, when none waits or runs any more. What somebody paused stays so."""
    limit = time.monotonic() + END_SECONDS
    with open_store(here.database) as store:
        while True:
            states = Counter(store.overviews.figures().jobs)
            if not any(states[state] for state in OPEN):
                return states
            assert time.monotonic() < limit, f"jobs did not end: {states}"
            time.sleep(0.5)


@contextmanager
def receivers() -> Iterator[Mapping[str, str]]:
    """Addresses of receivers of webhooks: one answers, one never does, one fails."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(500 if self.path == "/fails" else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with (
        socket.create_server(("127.0.0.1", 0), backlog=1) as silent,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        well = f"http://127.0.0.1:{server.server_port}"
        yield {"well": well, "fails": f"{well}/fails", "silent": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        server.shutdown()
        thread.join()


PAGE = """# Minutes of hostile and normal traffic

Written by `AUTOTUNE_HOSTILE_MINUTES=N AUTOTUNE_HOSTILE_ENDURANCE=docs/results/hostile-endurance.md python -m pytest
tests/hostile/test_endurance.py`: two API processes and two workers on one database. Normal clients submit, read, follow, clone
and cancel jobs; hostile ones send broken and large bodies, patterns that backtrack, half requests, guessed keys, webhooks to
silent and forbidden receivers, and odd lists. Halfway one row of the database is damaged. Figures are medians: of the first
third after the warm-up ({warm:.0%} of the time), and of the last third; memory also of each tenth of the time. No log has a
traceback, and no process has ended.

| database | minutes | process | memory (MB) | descriptors | threads | connections |
|---|---|---|---|---|---|---|
{lines}

| database | process | memory in each tenth of the time (MB) |
|---|---|---|
{series}

| database | answers to normal clients | answers to hostile ones | 5xx | jobs in the end |
|---|---|---|---|---|
{ends}

Connections on PostgreSQL are those of all processes together.
"""


def page(found: Sequence[Endured]) -> str:
    """Markdown: what each process held at first and at last."""
    lines, series, ends = [], [], []
    for one in found:
        for process in one.samples:
            cells = []
            for figure in MOST_GROWTH:
                first, last = one.parts(process, figure)
                scale = 1e6 if figure == "rss_bytes" else 1.0
                cells.append(f"{first / scale:.0f} → {last / scale:.0f}")
            tenths = ", ".join(f"{value / 1e6:.0f}" for value in one.series(process, "rss_bytes"))
            series.append(f"| {one.database} | {process} | {tenths} |")
            lines.append(f"| {one.database} | {one.minutes:g} | {process} | {' | '.join(cells)} |")
        normal = sum(count for name, count in one.asked.items() if name.startswith(("normal", "stream")))
        failed = sum(count for name, count in one.asked.items() if name.rpartition(" ")[2] in ("500", "502"))
        states = ", ".join(f"{count} {state}" for state, count in sorted(one.jobs.items()) if count)
        ends.append(f"| {one.database} | {normal:,} | {one.asked.total() - normal:,} | {failed} | {states} |")
    return PAGE.format(warm=WARM_UP, lines="\n".join(lines), series="\n".join(series), ends="\n".join(ends))
