"""A job with very many trials of every kind, for the page, and further trials that arrive."""

import math
import random
import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from sqlalchemy import create_engine, insert, update

from api.settings import Settings
from api.submission import JobSubmission, session_of_submission
from autotune.request.rows import request_to_row
from benchmarks.service.rows import measured
from search_spaces.outcome import Outcome, Purpose
from search_spaces.plain import to_plain
from search_spaces.trial import Interval, RankMeasurement, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.codec import dump_json
from storage.leases import current_owner
from storage.records import AttemptState, EventKind, Lease, Submission
from storage.store import open_store
from storage.tables import AttemptRow, EventRow, JobRow, TrialRow

PART = 2000
LIMIT = 32 * 2**20
NODES = 4
Row = dict[str, Any]


def write_job(database: str, trials: int) -> tuple[str, Iterator[TrialConfig]]:
    """Write a running job with `trials` finished trials; return its id, and configurations that it has not tried."""
    body = JobSubmission(
        model="llama-tiny", ranks=2, space="full", strategy="random", trials=trials + 10_000, memory_limit=LIMIT,
        runner="local",
    )  # fmt: skip
    session = session_of_submission(body, Settings(database_url=database), most_steps=10**9)
    with open_store(database) as store:
        job, _ = store.queue.submit(request_to_row(session.request), Submission())
    configs = _shuffled(session.space.enumerate(), trials + 2000)
    rows = _Rows(job.id, trials)
    rows.write(database, islice(configs, trials))
    return job.id, configs


def _shuffled(configs: Iterator[TrialConfig], count: int) -> Iterator[TrialConfig]:
    """`count` of the configurations in random order, as in a search."""
    some = list(islice(configs, 0, 40 * count, 40))
    random.Random(0).shuffle(some)
    return iter(some)


def figures_of(config: TrialConfig, number: int) -> tuple[float, int]:
    """Samples/s and peak bytes: larger micro-batches are faster and larger, higher stages slower and smaller."""
    chance = random.Random(number)
    rate = 60.0 * (1 + 0.4 * math.log2(config.micro_batch_size)) * (1 - 0.06 * config.zero_stage) * chance.uniform(0.9, 1.1)
    peak = (4 + 9 * config.micro_batch_size + 12 / (1 + config.zero_stage)) * chance.uniform(0.95, 1.05)
    if config.activation_checkpointing != "none":
        rate, peak = rate * 0.8, peak * 0.7
    return rate, int(peak * 2**20)


class _Rows:
    """Writes trials in bulk."""

    def __init__(self, job: str, trials: int) -> None:
        self._job = job
        self._began = datetime.now(UTC) - timedelta(seconds=2 * trials)

    def write(self, database: str, configs: Iterator[TrialConfig]) -> None:
        engine, number = create_engine(database, json_serializer=dump_json), 0
        with engine.begin() as connection:
            while part := list(islice(configs, PART)):
                rows = [self._rows(number + place, config) for place, config in enumerate(part)]
                for table, place in ((TrialRow, 0), (AttemptRow, 1)):
                    connection.execute(insert(table), [row[place] for row in rows])
                connection.execute(insert(EventRow), [event for row in rows for event in row[2]])
                number += len(part)
            counts = {
                "trial_count": number,
                "event_count": 1 + 2 * number,
                "created": self._began,
                "active_seconds": 2.0 * number,
            }
            connection.execute(update(JobRow).where(JobRow.id == self._job).values(**counts))
        engine.dispose()

    def _rows(self, number: int, config: TrialConfig) -> tuple[Row, Row, list[Row]]:
        rate, peak = figures_of(config, number)
        outcome = Outcome.FAILED if number % 23 == 9 else Outcome.INFEASIBLE if peak > LIMIT else Outcome.OK
        is_ok = outcome is Outcome.OK
        token, started = secrets.token_hex(16), self._began + timedelta(seconds=2 * number)
        trial = {
            "job_id": self._job, "number": number, "config": config.values(), "config_hash": config.hash,
            "purpose": Purpose.SEARCH, "fidelity": "full", "repeat": 0, "counted": True, "outcome": outcome,
            "samples_per_second_mean": rate if is_ok else None, "samples_per_second_low": 0.97 * rate if is_ok else None,
            "samples_per_second_high": 1.03 * rate if is_ok else None, "peak_memory_bytes": peak if is_ok else None,
            "attempt_count": 1, "created": started, "started": started, "finished": started + timedelta(seconds=1.8),
        }  # fmt: skip
        result = to_plain(measured(token, rate)) | {"outcome": outcome, "peak_memory_bytes": trial["peak_memory_bytes"]}
        result["ranks"][0]["node"] = f"node-{number % NODES}"
        attempt = {
            "token": token, "job_id": self._job, "trial_number": number, "number": 1, "state": AttemptState.ACCEPTED,
            "outcome": outcome, "host": "node-0", "started": started, "finished": trial["finished"], "result": result,
        }  # fmt: skip
        named = {"trial": number, "attempt": 1}
        kinds = ((EventKind.TRIAL_ADDED, {"trial": number, "purpose": "search"}),
                 (EventKind.ATTEMPT_FINISHED, named | {"state": "accepted", "outcome": outcome, "message": ""}))  # fmt: skip
        events = [
            {"job_id": self._job, "sequence": 2 + 2 * number + place, "time": started, "kind": str(kind), "payload": payload}
            for place, (kind, payload) in enumerate(kinds)
        ]
        return trial, attempt, events


class Live:
    """Begins and ends further trials of the job, as a worker does."""

    def __init__(self, database: str, job: str, configs: Iterator[TrialConfig]) -> None:
        self._store, self._configs = open_store(database), configs
        self._lease: Lease = self._store.jobs.acquire(job, current_owner(), seconds=3600.0)

    def one(self) -> None:
        """Run one trial: three events."""
        config = next(self._configs)
        number = self._store.trials.add(self._lease, config, Purpose.SEARCH).number
        token = self._store.attempts.start(self._lease, number).token
        rate, peak = figures_of(config, number)
        rank = RankMeasurement(
            rank=0, host="node-0", node=f"node-{number % NODES}", peak_memory_bytes=peak, memory_by_tag={}, tag_peak_bytes={},
            rss_peak_bytes=1, cpu_seconds_per_step=0.1, collectives=(),
        )  # fmt: skip
        interval = Interval(mean=rate, low=0.97 * rate, high=1.03 * rate)
        result = TrialResult(
            attempt=token, outcome=Outcome.OK, samples_per_second=interval, peak_memory_bytes=peak, ranks=(rank,)
        )
        self._store.attempts.finish(self._lease, result)

    def close(self) -> None:
        self._store.close()
