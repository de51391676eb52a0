"""Inserts rows in bulk, and makes a trial's result as ranks report it."""

import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

from sqlalchemy import Connection, create_engine, insert, update

from search_spaces.outcome import Outcome, Purpose
from search_spaces.plain import to_plain
from search_spaces.trial import CollectiveCount, Interval, RankMeasurement, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.codec import dump_json
from storage.records import AttemptState, EventKind
from storage.tables import AttemptRow, EventRow, JobRow, TrialRow

PART = 2000
TAGS = ("parameters", "gradients", "optimizer_state", "activations", "buffers")


def measured(token: str, rate: float = 80.0) -> TrialResult:
    """The result of two ranks."""
    ranks = tuple(
        RankMeasurement(
            rank=rank, host="node-1", peak_memory_bytes=123_456_789 + rank,
            memory_by_tag={tag: 20_000_000 + place for place, tag in enumerate(TAGS)},
            tag_peak_bytes={tag: 30_000_000 + place for place, tag in enumerate(TAGS)},
            rss_peak_bytes=10**9, cpu_seconds_per_step=0.1,
            collectives=tuple(
                CollectiveCount(operation=operation, mesh_dimension="data", count=3, bytes=10**6)
                for operation in ("all_reduce", "all_gather", "reduce_scatter")
            ),
        )
        for rank in range(2)
    )  # fmt: skip
    return TrialResult(
        attempt=token, outcome=Outcome.OK, losses=(5.1, 5.0, 4.9), gradient_norms=(1.0, 0.9, 0.8),
        step_seconds=tuple(0.1 + step / 1000 for step in range(20)), within_relative_error=0.01,
        samples_per_second=Interval(mean=rate, low=0.95 * rate, high=1.05 * rate), peak_memory_bytes=123_456_790, ranks=ranks,
        tflops_per_device=0.1, mfu=0.2, phase_seconds={"setup": 0.1, "build": 0.2, "warmup": 0.3, "measure": 1.0},
        environment={"torch": "2.11.0", "python": "3.11", "device": "cpu"},
    )  # fmt: skip


def add_planned(database: str, job_id: str, configs: Iterable[TrialConfig]) -> None:
    """Add trials to a new job that wait to run."""
    _in_one_transaction(database, job_id, configs, closed=False)


def add_measured(database: str, job_id: str, configs: Iterable[TrialConfig]) -> None:
    """Add trials to a new job with an accepted attempt each, and their events."""
    _in_one_transaction(database, job_id, configs, closed=True)


def _in_one_transaction(database: str, job_id: str, configs: Iterable[TrialConfig], closed: bool) -> None:
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"), json_serializer=dump_json)
    with engine.begin() as connection:
        _add(connection, job_id, configs, closed)
    engine.dispose()


def _add(connection: Connection, job_id: str, configs: Iterable[TrialConfig], closed: bool) -> None:
    rest, number, sequence = iter(configs), 0, 1
    now = datetime.now(UTC) - timedelta(days=1)
    while part := list(islice(rest, PART)):
        tokens = [secrets.token_hex(16) for _ in part]
        trials = [_trial(job_id, number + place, config, now, closed) for place, config in enumerate(part)]
        connection.execute(insert(TrialRow), trials)
        if closed:
            connection.execute(insert(AttemptRow), [_attempt(t, token, now) for t, token in zip(trials, tokens, strict=True)])
            events = [event for trial in trials for event in _events(trial, sequence + 3 * (trial["number"] - number), now)]
            connection.execute(insert(EventRow), events)
            sequence += 3 * len(part)
        number += len(part)
    counts: dict[str, Any] = {"trial_count": number} | ({"event_count": sequence} if closed else {})
    connection.execute(update(JobRow).where(JobRow.id == job_id).values(**counts))


def _rate(number: int) -> float:
    return 80.0 + (number * 7919 % 1000) / 100


def _trial(job_id: str, number: int, config: TrialConfig, now: datetime, closed: bool) -> dict[str, Any]:
    rate = _rate(number)
    return {
        "job_id": job_id, "number": number, "config": config.values(), "config_hash": config.hash, "purpose": Purpose.SEARCH,
        "fidelity": "full", "repeat": 0, "counted": closed, "outcome": Outcome.OK if closed else None,
        "samples_per_second_mean": rate if closed else None, "samples_per_second_low": 0.95 * rate if closed else None,
        "samples_per_second_high": 1.05 * rate if closed else None, "peak_memory_bytes": 123_456_790 if closed else None,
        "attempt_count": int(closed), "created": now, "started": now if closed else None,
        "finished": now + timedelta(seconds=1) if closed else None,
    }  # fmt: skip


def _attempt(trial: dict[str, Any], token: str, now: datetime) -> dict[str, Any]:
    return {
        "token": token, "job_id": trial["job_id"], "trial_number": trial["number"], "number": 1, "state": AttemptState.ACCEPTED,
        "outcome": Outcome.OK, "host": "node-1", "started": now, "finished": now + timedelta(seconds=1),
        "result": to_plain(measured(token, _rate(trial["number"]))),
    }  # fmt: skip


def _events(trial: dict[str, Any], before: int, now: datetime) -> list[dict[str, Any]]:
    named = {"trial": trial["number"], "attempt": 1}
    events: list[tuple[str, dict[str, Any]]] = [
        (EventKind.TRIAL_ADDED, {"trial": trial["number"], "config": trial["config"], "purpose": "search"}),
        (EventKind.ATTEMPT_STARTED, named),
        (EventKind.ATTEMPT_FINISHED, named | {"state": "accepted", "outcome": "OK", "message": ""}),
    ]
    return [
        {"job_id": trial["job_id"], "sequence": before + place, "time": now, "kind": str(kind), "payload": payload}
        for place, (kind, payload) in enumerate(events, 1)
    ]
