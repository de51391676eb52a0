"""A job's trials for plots: all of them, or what changed since; kept between two looks, so that the next costs what is new."""

import threading
from collections import OrderedDict
from typing import Any

from pydantic_core import to_json

from api.point_columns import Knobs, Words, columns
from autotune.forecast.initial_forecast import InitialForecast, foresight_of
from autotune.loop.job_cost import ended, job_seconds_left
from autotune.outcome.job_snapshot import JobSnapshot, SnapshotReader
from autotune.outcome.verdict import Verdict, Verdicts, answer_document
from autotune.session.resolve import session_of
from search_spaces.outcome import Outcome
from storage.records import JobNews, JobRecord, Placement, TrialRecord
from storage.store import Store

MOST_EVENTS = 2000
"""Who knows less than that of a job's events is given all of its trials."""
NONE = 2**62
"""Beyond every event: who asks for what comes after it is told the job's version alone."""
KEPT_TRIALS = 50_000
"""Trials of the jobs that are kept, at some two kilobytes each; the job that was asked for last is kept however large."""


class JobPoints:
    """One job's trials, as far as they were read. May be used from several threads."""

    def __init__(self, store: Store, job: JobRecord) -> None:
        self._store, self._job_id = store, job.id
        self._lock = threading.Lock()
        self._reader = SnapshotReader(store, job.id)
        self._session = session_of(job)
        self._foresight = foresight_of(store, job.id, self._session)
        self._knobs, self._words = Knobs(self._session.space.domains), Words()
        self._foreseen: dict[str, InitialForecast] = {}
        self._placements: dict[int, Placement] = {}
        self._closed = 0
        self._verdicts = Verdicts()
        self._decided: tuple[Verdict | None, dict[str, Any]] = None, _decision(None)

    def __len__(self) -> int:
        return len(self._knobs)

    def read(self, since: int) -> bytes:
        """`PointsView` as JSON.

        1. The events beyond `since` name the trials that changed. They are read before the rows, which so may be newer, never
           older: what is newer still is told again by the next look.
        2. The rows from the first open trial on; what is before is known.
        3. Columns of the trials that changed, and what was decided, anew where a measurement came.
        """
        with self._lock:
            news = self._store.news({self._job_id: since or NONE}, MOST_EVENTS)[self._job_id]
            known = len(self._knobs)
            book = self._reader.read()
            trials = book.trials
            self._take(trials[known:])
            whole = since == 0 or since < book.job.events_removed or news.version - since > MOST_EVENTS
            changed = trials if whole else _changed(trials, news)
            # Those of trials that had ended by the last look are as they were.
            self._placements |= self._store.placements(self._job_id, self._closed)
            self._closed = book.closed_count
            return to_json(self._view(book, news, whole, changed), inf_nan_mode="null")

    def _take(self, new: list[TrialRecord]) -> None:
        self._knobs.grow([trial.config for trial in new])
        # The equations know legal configurations alone.
        legal = (trial for trial in new if trial.outcome is not Outcome.INVALID)
        unforeseen = {trial.config_hash: trial.config for trial in legal if trial.config_hash not in self._foreseen}
        if self._foresight is not None and unforeseen:
            found = self._foresight.of(list(unforeseen.values()))
            self._foreseen |= dict(zip(unforeseen, found, strict=True))

    def _view(self, book: JobSnapshot, news: JobNews, whole: bool, changed: list[TrialRecord]) -> dict[str, Any]:
        job, ranking = book.job, self._session.ranking
        capacity = ranking.capacity_bytes
        return {
            "job": job.id,
            "state": news.state,
            "version": news.version,
            "whole": whole,
            "count": len(self._knobs),
            "epoch": job.created,
            "objective": ranking.objective,
            "limit_bytes": ranking.memory_limit_bytes,
            "capacity_bytes": None if capacity == float("inf") else int(capacity),
            "rests_on": None if self._foresight is None else self._foresight.rests_on,
            "seconds_left": job_seconds_left(job, ended(book.trials)),
            **self._decision(book),
            "knobs": self._knobs.columns([trial.number for trial in changed]),
            "constants": self._knobs.constants(),
            "columns": columns(changed, self._words, ranking, self._placements, self._foreseen, job.created),
            **self._words.lists(),
        }

    def _decision(self, book: JobSnapshot) -> dict[str, Any]:
        """The verdict and the front."""
        session = self._session
        verdict = self._verdicts.of(book, session.ranking, session.prior, session.baselines)
        if verdict is not self._decided[0]:
            self._decided = verdict, _decision(verdict)
        return self._decided[1]


class PointsBoard:
    """The jobs that were looked at last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, JobPoints] = OrderedDict()

    def knows(self, job_id: str) -> bool:
        """Whether the job's trials were read before, so that reading what is new is quick."""
        return job_id in self._jobs

    def read(self, job: JobRecord, since: int) -> bytes:
        """`PointsView` of the job as JSON. Raises what `session_of` raises."""
        with self._lock:
            points = self._jobs.get(job.id)
        if points is None:
            made = JobPoints(self._store, job)
            with self._lock:
                points = self._jobs.setdefault(job.id, made)
        body = points.read(since)
        self._keep(job.id)
        return body

    def _keep(self, job_id: str) -> None:
        with self._lock:
            if job_id in self._jobs:
                self._jobs.move_to_end(job_id)
            while len(self._jobs) > 1 and sum(map(len, self._jobs.values())) > KEPT_TRIALS:
                self._jobs.popitem(last=False)


def _changed(trials: list[TrialRecord], news: JobNews) -> list[TrialRecord]:
    """The trials that the events name, by number."""
    named = {event.payload.get("trial") for event in news.events}
    return [trials[number] for number in sorted(number for number in named if isinstance(number, int) and number < len(trials))]


def _decision(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {"front": [], "best": None}
    return {"front": [trial.number for trial in verdict.standings.front()], "best": answer_document(verdict)}
