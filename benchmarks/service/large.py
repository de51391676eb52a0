"""A job with very many trials: pages over REST, all its events, the best, and resuming it in bounded found."""

import http.client
import json
import statistics
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

from api.settings import Settings
from api.submission import JobSubmission, session_of_submission
from autotune.request.rows import request_to_row
from benchmarks.service.place import OWNER, Place, rss_bytes, service
from benchmarks.service.report import Claim, Report, milliseconds
from benchmarks.service.rows import add_measured
from storage.records import Submission
from storage.store import open_store

PAGES = 40
PAGE_SECONDS = 0.050
RESUME_BYTES = 400 * 2**20


class _Client:
    """One persistent connection."""

    def __init__(self, place: Place) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=300)
        self._headers = dict(line.split(": ", 1) for line in place.headers)

    def get(self, path: str) -> tuple[float, bytes]:
        """Seconds until the complete answer, and the answer."""
        began = time.perf_counter()
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"GET {path}: {answer.status} {body[:300]!r}")
        return time.perf_counter() - began, body


def measure_large(database: str, kind: str, trials: int, report: Report) -> None:
    """Write the job, read it over REST, and resume it."""
    job_id = _job(database, "grid", trials)
    with service(database) as place:
        _read(place, job_id, kind, trials, report)
    _resume(database, job_id, "grid", kind, trials, report)


def measure_adviser(database: str, kind: str, trials: int, report: Report) -> None:
    """Resume a job whose strategy is given the whole history again before each answer."""
    _resume(database, _job(database, "tpe", trials), "tpe", kind, trials, report)


def _job(database: str, strategy: str, trials: int) -> str:
    """A job that has tried the first configurations of its space, in the space's order."""
    body = JobSubmission(model="llama-tiny", ranks=2, space="full", strategy=strategy, trials=1_000_000, runner="local")
    session = session_of_submission(body, Settings(database_url=database), most_steps=10**9)
    with open_store(database) as store:
        job, _ = store.queue.submit(request_to_row(session.request), Submission(submitter=OWNER))
    add_measured(database, job.id, islice(session.space.enumerate(), trials))
    return job.id


def _read(place: Place, job_id: str, kind: str, trials: int, report: Report) -> None:
    client = _Client(place)
    client.get("/v1/jobs")
    for name, path in (("list of jobs", "/v1/jobs"), ("first page of 100 trials", f"/v1/jobs/{job_id}/trials")):
        seconds = sorted(client.get(path)[0] for _ in range(PAGES))
        report.claim(
            Claim(
                f"{name}, {kind}", f"median under {milliseconds(PAGE_SECONDS)}",
                f"median {milliseconds(statistics.median(seconds))}, 99th percentile {milliseconds(seconds[-1])}",
                statistics.median(seconds) < PAGE_SECONDS,
            )
        )  # fmt: skip
    before = rss_bytes(place)
    began, count, cursor = time.perf_counter(), 0, 0
    while cursor is not None:
        page = json.loads(client.get(f"/v1/jobs/{job_id}/trials?limit=1000&cursor={cursor}")[1])
        count, cursor = count + len(page["items"]), page["next"]
    report.note(f"{kind}: all {count:,} trials in pages of 1,000: {time.perf_counter() - began:.1f} s.")
    began = time.perf_counter()
    events = _stream(place, f"/v1/jobs/{job_id}/events/stream", 3 * trials + 1)
    seconds, grown = time.perf_counter() - began, (rss_bytes(place) - before) / 2**20
    report.note(
        f"{kind}: all its {events:,} events as a stream: {seconds:.1f} s; with the pages before, "
        f"the API process grew by {grown:.0f} MiB."
    )
    before = rss_bytes(place)
    seconds, _ = _Client(place).get(f"/v1/jobs/{job_id}/best")  # the first connection was idle too long
    report.note(f"{kind}: `GET best`: {seconds:.1f} s; the API process grew by {(rss_bytes(place) - before) / 2**20:.0f} MiB.")


def _stream(place: Place, path: str, until: int) -> int:
    """Follow a stream until event number `until`; return the number of events received."""
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=300)
    connection.request("GET", path, headers=dict(line.split(": ", 1) for line in place.headers))
    answer, count = connection.getresponse(), 0
    for line in answer:
        if line.startswith(b"id: "):
            count += 1
            if int(line[4:]) >= until:
                break
    connection.close()
    return count


def _resume(database: str, job_id: str, strategy: str, kind: str, trials: int, report: Report) -> None:
    command = [sys.executable, str(Path(__file__).with_name("resume.py")), database, job_id]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    base = found["base"]
    grown = found["peak"] - base
    times = (
        f"all rows read in {found['recall_seconds']:.1f} s, first proposal after {found['first_seconds']:.1f} s, "
        f"each further turn of the loop {milliseconds(found['turn_seconds'])} (recall and propose)"
    )
    measured = f"{grown / 2**20:.0f} MiB over {base / 2**20:.0f} MiB ({grown / trials / 1024:.1f} KiB a trial); {times}"
    name = f"resume with {strategy}, {kind}"
    if strategy == "tpe":
        report.note(f"{name}, {trials:,} trials: {measured}. It is given the whole history again before each answer.")
    else:
        report.claim(
            Claim(name, f"peak at most {RESUME_BYTES / 2**20:.0f} MiB above the base", measured, grown <= RESUME_BYTES)
        )
