"""Where attacks are made: a real server, workers where they are wanted, and a normal client who reads meanwhile.

with ground(tmp_path, database) as here, here.normal_client() as client:
    attack(here.url, here.key("mallory"))
rows.append(Row(finding=FREEZE, database=here.kind, after="…", client=client, usage=here.usage()))
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from executor.process_tree import descendants
from storage.store import open_store
from tests.ports import free_port

HEAVY = bool(os.environ.get("AUTOTUNE_HOSTILE"))
"""Whether attacks are as hard as they can be, and times count: `make hostile`. The variable names the page that is written."""
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "import sys; from autotune.cli import main; sys.exit(main())"]
PEOPLE = Path(__file__).with_name("people.py")
MEASURED = {
    "outcome": "OK", "losses": [5.0, 4.5], "step_seconds": [0.1] * 5, "within_relative_error": 0.01, "peak_memory_bytes": 10**6,
    "samples_per_second": {"mean": 80.0, "low": 79.0, "high": 81.0},
}  # fmt: skip
JOB = {"model": "llama-tiny", "ranks": 2, "space": "zero", "trials": 3, "global_batch_size": 8, "sequence_length": 64}
"""What a normal client submits."""
READ_SECONDS, LIVEZ_SECONDS = 0.100, 0.050
"""Bounds of a normal client's 99th percentiles during an attack, on a machine of REST_SECONDS."""
REST_SECONDS, MOST_SLOWNESS = 0.005, 4.0
"""Median read of a normal client of a server at rest. Where it takes longer, the bounds are longer by the same factor, up to
MOST_SLOWNESS: the same code was at 64 ms in one night and at 130 to 157 ms in another."""
MOST_RSS_BYTES = 400_000_000
"""Of each process of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an attack showed before its cause was removed."""

    number: int
    """Position in the page; findings of one theme may share a number."""
    title: str
    attack: str
    """What the attacker does."""
    before: str
    """What was measured before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the processes of a server hold: the largest of each figure."""

    rss_bytes: int
    peak_rss_bytes: int
    descriptors: int
    threads: int


@dataclass(slots=True, kw_only=True)
class NormalClient:
    """How long the normal client waited. Filled when it has ended. Seconds."""

    readings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """`list`, `job` and `livez` -> count, failed (no answer), refused (none with 200), median, p99, worst."""

    def read_p99(self) -> float:
        """The larger 99th percentile of the two reads."""
        return max(self.readings["list"]["p99"], self.readings["job"]["p99"])

    def require_served(self) -> None:
        """Every request was answered with 200; where times count, within the bounds."""
        assert self.readings, "the normal client has not ended"
        for name, reading in self.readings.items():
            assert reading["count"] > 0 and reading["failed"] == reading["refused"] == 0, (name, reading)
        if HEAVY:
            slowness = _slowness[0]
            assert self.read_p99() < READ_SECONDS * slowness, (slowness, self.readings)
            assert self.readings["livez"]["p99"] < LIVEZ_SECONDS * slowness, (slowness, self.readings)


_slowness: list[float] = []
"""How much slower than REST_SECONDS this machine is, once it has been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One attack on one database, as the page shows it."""

    finding: Finding
    database: str
    after: str
    client: NormalClient | None = None
    usage: Usage | None = None


@dataclass(slots=True, kw_only=True)
class NodePool:
    """A server that runs, and what it takes to attack it."""

    folder: Path
    """Of its log, of SQLite's file and of the workers' table."""
    database: str
    port: int
    server: "subprocess.Popen[bytes]"
    workers: "list[subprocess.Popen[bytes]]"
    keys: bool
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of all processes: for those that an attack starts beside them."""
    normal_key: str = ""
    _normal_job: str = ""

    @property
    def url(self) -> str:
        """Of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def kind(self) -> str:
        """The database's."""
        return "PostgreSQL" if self.database.startswith("postgres") else "SQLite"

    def key(self, owner: str, scopes: Sequence[str] = ("read", "submit")) -> str:
        """A new key; empty where keys are not asked for."""
        if not self.keys:
            return ""
        with open_store(self.database) as store:
            return store.keys.create(owner, frozenset(scopes))[1]

    def client(self, key: str = "", **options: Any) -> httpx2.Client:
        """An HTTP client of the server. The caller closes it.

        It reads no certificates, since the server has none: that takes 56 ms of the processor, which the server shares.
        """
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        defaults = {"timeout": 120.0, "trust_env": False, "verify": False}
        return httpx2.Client(base_url=self.url, headers=headers, **{**defaults, **options})

    @contextmanager
    def normal_client(self) -> Iterator[NormalClient]:
        """Somebody who reads the list, a job and /livez meanwhile. Times that were waited are there afterwards."""
        if not self._normal_job:
            self.normal_key = self.key("norma")
            with self.client(self.normal_key) as http:
                answer = http.post("/v1/jobs", json=JOB)
                assert answer.status_code == httpx2.codes.ACCEPTED, answer.text
                self._normal_job = answer.json()["id"]
        words = [sys.executable, str(PEOPLE), "127.0.0.1", str(self.port), self._normal_job, self.normal_key]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        client = NormalClient()
        try:
            assert process.stdout is not None and process.stdout.readline() == "asking\n"
            yield client
            client.readings = json.loads(process.communicate(timeout=180)[0])
        finally:
            process.kill()
            process.communicate()

    def usage(self) -> Usage:
        """What the server's processes hold now."""
        found = [held for pid in [self.server.pid, *descendants(self.server.pid)] if (held := _usage(pid)) is not None]
        assert found, "the server has ended"
        names = ("rss_bytes", "peak_rss_bytes", "descriptors", "threads")
        usage = Usage(**{name: max(getattr(held, name) for held in found) for name in names})
        assert usage.peak_rss_bytes < MOST_RSS_BYTES
        return usage

    def log(self) -> str:
        """What the server has written."""
        return (self.folder / "server.log").read_text(errors="replace")

    def is_alive(self) -> bool:
        """Whether the server runs and answers."""
        if self.server.poll() is not None:
            return False
        try:
            with self.client(timeout=30.0) as http:
                return http.get("/readyz").status_code == httpx2.codes.OK
        except httpx2.TransportError:
            return False


@contextmanager
def ground(
    folder: Path,
    database: str | None = None,
    *,
    keys: bool = False,
    workers: int = 0,
    serve: Sequence[object] = (),
    worker: Sequence[object] = ("--replay", "table.json"),
    seconds_per_trial: float = 0.05,
    environment: Mapping[str, str] | None = None,
) -> Iterator[NodePool]:
    """`autotune serve`, and workers that answer trials from a table. All have ended, without a traceback, when this returns.

    Args:
        folder: for everything that is written.
        database: address; None: a file in the folder.
        keys: whether requests need keys.
        workers: how many.
        serve: further options of `autotune serve`.
        worker: options of `autotune worker`.
        seconds_per_trial: of the table.
        environment: further variables of all processes.
    """
    address = f"sqlite:///{folder / 'jobs.db'}" if database is None else database
    (folder / "table.json").write_text(json.dumps({"*": MEASURED, "seconds_per_trial": seconds_per_trial}))
    variables = os.environ | {
        "AUTOTUNE_DB": address, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "AUTOTUNE_QUICK_CALIBRATION": "off",
    } | dict(environment or {})  # fmt: skip
    port = free_port()
    if keys:
        with open_store(address) as store:
            store.keys.create("admin", frozenset(("read", "submit", "admin")))
    with ExitStack() as stack:
        asks = "--keys" if keys else "--no-keys"
        command = ["serve", "--no-worker", "--port", str(port), asks, *map(str, serve)]
        server = stack.enter_context(_process(command, folder, "server", variables))
        here = NodePool(folder=folder, database=address, port=port, server=server, workers=[], keys=keys, variables=variables)
        limit = time.monotonic() + 120
        while not here.is_alive():
            assert server.poll() is None and time.monotonic() < limit, here.log()
            time.sleep(0.1)
        if HEAVY and not _slowness:
            with here.normal_client() as client:
                time.sleep(5)
            _slowness.append(min(max(client.readings["list"]["median"] / REST_SECONDS, 1.0), MOST_SLOWNESS))
        for number in range(workers):
            words = ["worker", *map(str, worker)]
            here.workers.append(stack.enter_context(_process(words, folder, f"worker{number}", variables)))
        yield here
    logs = {path.name: path.read_text(errors="replace") for path in folder.glob("*.log")}
    assert not [name for name, text in logs.items() if "Traceback" in text], logs


@contextmanager
def _process(
    words: Sequence[str], folder: Path, name: str, variables: Mapping[str, str]
) -> "Iterator[subprocess.Popen[bytes]]":
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*COMMAND, *words], env=variables, cwd=folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _usage(pid: int) -> Usage | None:
    """None: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    status = dict(line.split(":", 1) for line in lines)
    if "VmRSS" not in status:
        return None
    kilobytes = {name: int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}
    return Usage(
        rss_bytes=kilobytes["VmRSS"],
        peak_rss_bytes=kilobytes["VmHWM"],
        descriptors=descriptors,
        threads=int(status["Threads"]),
    )


PAGE = """# Attacks and what came of them

Written by `make hostile`, on {cores} cores. Each attack runs against a real `autotune serve` (and workers where it needs them).
Meanwhile a normal client reads the list of jobs, one job and `/livez`, each {pace:.0f} times a second; a request that could not
be sent in time counts from when it was due. Bounds: reads under {read:.0f} ms and `/livez` under {livez:.0f} ms at the 99th
percentile where a read of a server at rest takes {rest:.0f} ms, and longer by the same factor on slower machines (in this run
{slowness:.1f}); at most {rss:.0f} MB of memory in each process of the server.

| finding | attack | before | after |
|---|---|---|---|
{findings}

## The normal client meanwhile

| finding | database | reads, p99 (ms) | `/livez`, p99 (ms) | longest wait (ms) | peak memory (MB) | descriptors | threads |
|---|---|---|---|---|---|---|---|
{clients}
"""


def page(rows: Sequence[Row]) -> str:
    """Markdown: every finding before and after."""
    rows = sorted(rows, key=lambda row: (row.finding.number, row.finding.title))
    findings: dict[Finding, dict[str, str]] = {}
    for row in rows:
        findings.setdefault(row.finding, {})[row.database] = row.after
    lines = [
        f"| {finding.number}. {finding.title} | {finding.attack} | {finding.before} | {_together(after)} |"
        for finding, after in findings.items()
    ]
    return PAGE.format(
        cores=os.cpu_count(), pace=10, read=READ_SECONDS * 1e3, livez=LIVEZ_SECONDS * 1e3, rss=MOST_RSS_BYTES / 1e6,
        rest=REST_SECONDS * 1e3, slowness=_slowness[0] if _slowness else 1.0,
        findings="\n".join(lines), clients="\n".join(_client_line(row) for row in rows if row.client is not None),
    )  # fmt: skip


def _together(after: Mapping[str, str]) -> str:
    if len(set(after.values())) == 1:
        return next(iter(after.values()))
    return "<br>".join(f"{database}: {text}" for database, text in after.items())


def _client_line(row: Row) -> str:
    assert row.client is not None
    readings, usage = row.client.readings, row.usage
    worst = max(reading["worst"] for reading in readings.values())
    cells = [f"{row.finding.number}. {row.finding.title}", row.database]
    cells += [f"{seconds * 1e3:.0f}" for seconds in (row.client.read_p99(), readings["livez"]["p99"], worst)]
    held = ["–"] * 3 if usage is None else [f"{usage.peak_rss_bytes / 1e6:.0f}", str(usage.descriptors), str(usage.threads)]
    return "| " + " | ".join([*cells, *held]) + " |"
