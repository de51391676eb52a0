"""Users of the service while it is measured: writers of results and followers of events, in separate processes."""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from queue import Empty
from typing import Any, TypeVar

from benchmarks.service.connections import request
from benchmarks.service.rows import add_planned, measured
from search_spaces.outcome import Purpose
from search_spaces.trial_config import TrialConfig
from storage.errors import DatabaseUnavailableError
from storage.leases import current_owner
from storage.records import JobRecord, Lease
from storage.store import Store, open_store

LEASE_SECONDS = 600.0
MOST_RESULTS = 250
"""Attempts prepared for each second of a writer, more than it can finish."""
T = TypeVar("T")
_SPAWN = multiprocessing.get_context("spawn")


class Child:
    """A function in a separate process, which first reports that it is ready, and then gives one answer."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._queue: Any = _SPAWN.Queue()
        self._process = _SPAWN.Process(target=work, args=(*arguments, self._queue), daemon=True)
        self._process.start()

    def answer(self, seconds: float = 120.0) -> Any:
        """The next item that the process puts."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                return self._queue.get(timeout=1.0)
            except Empty:
                if not self._process.is_alive():
                    break
        raise SystemExit(f"a process of the benchmark gave no answer (exit code {self._process.exitcode})")

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def record_results(database: str, job_ids: Sequence[str], rate: float, begin: float, seconds: float, queue: Any) -> None:
    """Start and finish attempts of waiting trials, `rate` a second, like a worker; report their number and the CPU used."""
    with open_store(database) as store:
        leases = [store.jobs.acquire(job_id, current_owner(), LEASE_SECONDS) for job_id in job_ids]
        queue.put("ready")
        time.sleep(max(0.0, begin - time.time()))
        began, used, late = time.perf_counter(), time.process_time(), 0.0
        total = int(rate * seconds)
        for number in range(total):
            wait = began + number / rate - time.perf_counter()
            time.sleep(max(0.0, wait))
            late = max(late, -wait)
            lease = leases[number % len(leases)]
            attempt = store.attempts.start(lease, number // len(leases))
            store.attempts.finish(lease, measured(attempt.token))
        queue.put({"results": total, "seconds": time.perf_counter() - began, "cpu": time.process_time() - used, "late": late})


def write_results(database: str, seconds: float, whole: bool, queue: Any) -> None:
    """Record results of a new job as fast as possible; report their number, the longest transaction and the CPU used.

    The attempts are already running, like workers'; with `whole` each trial is also added and started: two more transactions.
    """
    with open_store(database) as store:
        job: JobRecord = store.jobs.create({"model": "llama-tiny"})
        lease = store.jobs.acquire(job.id, current_owner(), LEASE_SECONDS)
        tokens = [] if whole else _started(database, store, lease, int(seconds * MOST_RESULTS))
        queue.put("ready")
        began, used, count, longest, errors = time.perf_counter(), time.process_time(), 0, 0.0, 0

        def timed(write: Callable[[], T]) -> T:
            nonlocal longest
            moment = time.perf_counter()
            try:
                return write()
            finally:
                longest = max(longest, time.perf_counter() - moment)

        while time.perf_counter() < began + seconds and (whole or tokens):
            try:
                token = timed(partial(_start, store, lease, count)) if whole else tokens.pop()
                timed(partial(store.attempts.finish, lease, measured(token)))
                count += 1
            except DatabaseUnavailableError:
                errors += 1
        span = time.perf_counter() - began
        queue.put({"results": count, "seconds": span, "cpu": time.process_time() - used, "longest": longest, "errors": errors})


def _started(database: str, store: Store, lease: Lease, count: int) -> list[str]:
    """Tokens of running attempts."""
    add_planned(f"sqlite:///{database}", lease.job_id, [TrialConfig(reduce_bucket_size=1000 + n) for n in range(count)])
    return [store.attempts.start(lease, number).token for number in range(count)]


def _start(store: Store, lease: Lease, number: int) -> str:
    trial = store.trials.add(lease, TrialConfig(reduce_bucket_size=1000 + number), Purpose.SEARCH)
    return store.attempts.start(lease, trial.number).token


class _Follower(asyncio.Protocol):
    """One stream: records each event's age on arrival."""

    def __init__(self, lags: list[float]) -> None:
        self._lags, self._rest = lags, b""

    def data_received(self, data: bytes) -> None:
        now = time.time()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                moment = datetime.fromisoformat(json.loads(line[6:])["time"])
                self._lags.append(now - moment.astimezone(UTC).timestamp())


def follow(
    port: int, job_ids: Sequence[str], streams: int, headers: list[str], begin: float, seconds: float, queue: Any
) -> None:
    """Open streams of the jobs' new events, and report the lag of each event that arrived while results were recorded."""

    async def run() -> list[float]:
        lags: list[float] = []
        loop = asyncio.get_running_loop()
        for number in range(streams):
            path = f"/v1/jobs/{job_ids[number % len(job_ids)]}/events/stream?after=2"
            transport, _ = await loop.create_connection(lambda: _Follower(lags), "127.0.0.1", port)
            transport.write(request("GET", path, headers))
        queue.put("ready")
        await asyncio.sleep(begin - time.time())
        lags.clear()
        await asyncio.sleep(seconds + 2.0)
        return list(lags)

    queue.put(asyncio.run(run()))
