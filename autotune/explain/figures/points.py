"""A job's trials as columns, which the figures of the trials are drawn from; a further reading costs only what is new."""

import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from autotune.forecast import InitialForecast, InitialForecaster
from autotune.loop.budget import ended, job_seconds_left
from autotune.objective.ranking import Ranking
from autotune.outcome.job_snapshot import JobSnapshot, SnapshotReader
from autotune.outcome.verdict import JobVerdict, Verdicts, answer_document
from autotune.session.session import Session
from autotune.wire.jobs import Verdict
from autotune.wire.trials import KnobColumn, PointColumns, Points
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain
from search_spaces.shared_records import JobNews
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import AttemptPlacement, JobRecord, TrialRecord

if TYPE_CHECKING:
    from storage.store import Store

MOST_EVENTS = 2000
"""A client that is more events behind gets all trials."""
NONE = 2**62
"""A number beyond every event: with it, a query for news returns only the job's version."""


class JobPoints:
    """One job's trials, as far as they were read. Thread-safe."""

    def __init__(self, store: "Store", job: JobRecord, session: Session, forecaster: InitialForecaster | None) -> None:
        """`forecaster`: the forecast before the job's first trial; None: the equations do not know the model."""
        self._store, self._job_id = store, job.id
        self._lock = threading.Lock()
        self._reader = SnapshotReader(store, job.id)
        self._session, self._forecaster = session, forecaster
        self._knobs = Knobs(self._session.space.domains)
        self._words = {kind: Codes() for kind in ("outcomes", "purposes", "fidelities", "causes", "nodes")}
        self._predicted: dict[str, InitialForecast] = {}
        self._placements: dict[int, AttemptPlacement] = {}
        self._closed = 0
        self._verdicts = Verdicts()
        self._decided: tuple[JobVerdict | None, dict[str, Any]] = None, _decision(None)

    def __len__(self) -> int:
        return len(self._knobs)

    def read(self, since: int) -> Points:
        """The trials that changed since a version; since 0: all.

        1. Read the events after `since`, which name the changed trials. They are read before the rows, so rows may be newer but
           not older; the next request returns the newer changes again.
        2. Read the rows from the first open trial on; earlier rows are cached.
        3. Build the columns of the changed trials, and the decision, which is recomputed if there is a new measurement.
        """
        with self._lock:
            news = self._store.events.news({self._job_id: since or NONE}, MOST_EVENTS)[self._job_id]
            snapshot = self._reader.read()
            self._take(snapshot)
            whole = since == 0 or since < snapshot.job.events_removed or news.version - since > MOST_EVENTS
            return self._view(snapshot, news, whole, snapshot.trials if whole else _changed(snapshot.trials, news))

    def of(self, snapshot: JobSnapshot) -> Points:
        """All trials of a snapshot that has been read already."""
        with self._lock:
            news = self._store.events.news({self._job_id: NONE}, MOST_EVENTS)[self._job_id]
            self._take(snapshot)
            return self._view(snapshot, news, True, snapshot.trials)

    def _take(self, snapshot: JobSnapshot) -> None:
        """Add the trials that are new, and the placements of those that had not ended before."""
        new = snapshot.trials[len(self._knobs) :]
        self._placements |= self._store.attempts.placements(self._job_id, self._closed)
        self._closed = snapshot.closed_count
        self._knobs.grow([trial.config for trial in new])
        # The equations handle only legal configurations.
        legal = (trial for trial in new if trial.outcome is not Outcome.INVALID)
        unpredicted = {trial.config_hash: trial.config for trial in legal if trial.config_hash not in self._predicted}
        if self._forecaster is not None and unpredicted:
            forecasts = self._forecaster.of(list(unpredicted.values()))
            self._predicted |= dict(zip(unpredicted, forecasts, strict=True))

    def _view(self, snapshot: JobSnapshot, news: JobNews, whole: bool, changed: list[TrialRecord]) -> Points:
        job, ranking = snapshot.job, self._session.ranking
        capacity = ranking.capacity_bytes
        trial_columns = columns(changed, self._words, ranking, self._placements, self._predicted, job.created)
        words: dict[str, Any] = {kind: tuple(codes.values) for kind, codes in self._words.items()}
        return Points(
            job=job.id,
            state=news.state,
            version=news.version,
            whole=whole,
            count=len(self._knobs),
            epoch=job.created,
            objective=ranking.objective,
            limit_bytes=ranking.memory_limit_bytes,
            capacity_bytes=None if capacity == float("inf") else int(capacity),
            calibration_source=None if self._forecaster is None else self._forecaster.calibration_source,
            seconds_left=job_seconds_left(job, ended(snapshot.trials)),
            **self._decision(snapshot),
            knobs=self._knobs.columns([trial.number for trial in changed]),
            constants=self._knobs.constants(),
            columns=trial_columns,
            **words,
        )

    def _decision(self, snapshot: JobSnapshot) -> dict[str, Any]:
        """The answer and the front."""
        session = self._session
        verdict = self._verdicts.of(snapshot, session.ranking, session.prior, session.baselines)
        if verdict is not self._decided[0]:
            self._decided = verdict, _decision(verdict)
        return self._decided[1]


def _changed(trials: list[TrialRecord], news: JobNews) -> list[TrialRecord]:
    """The trials that the events name, by number."""
    numbers = {event.payload.get("trial") for event in news.events}
    return [
        trials[number] for number in sorted(number for number in numbers if isinstance(number, int) and number < len(trials))
    ]


def _decision(verdict: JobVerdict | None) -> dict[str, Any]:
    if verdict is None:
        return {"front": (), "best": None}
    return {
        "front": tuple(trial.number for trial in verdict.standings.front()),
        "best": from_plain(Verdict, answer_document(verdict)),
    }


_values_of = operator.attrgetter(*KNOB_NAMES)


@dataclass(slots=True)
class Codes:
    """Assigns numbers to words in the order of their first use; an assigned number never changes."""

    values: list[Any] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)

    def of(self, value: Any) -> int:
        """The value's number."""
        code = self.numbers.get(value)
        if code is None:
            code = self.numbers[value] = len(self.values)
            self.values.append(value)
        return code

    def of_word(self, word: str | None) -> int | None:
        """The word's number; None: no word."""
        return None if not word else self.of(str(word))


class Knobs:
    """The knobs of a job's trials: the values of each, and which have several."""

    def __init__(self, searched: Mapping[str, Sequence[Value]]) -> None:
        self._codes = {name: Codes() for name in KNOB_NAMES}
        self._searched = {name for name, values in searched.items() if len(values) > 1}
        self._rows: list[tuple[int, ...]] = []

    def grow(self, configs: Sequence[TrialConfig]) -> None:
        """Add the configurations of the next trials, by number."""
        codes = list(self._codes.values())
        for config in configs:
            self._rows.append(tuple(code.of(value) for code, value in zip(codes, _values_of(config), strict=True)))

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self, numbers: Sequence[int]) -> tuple[KnobColumn, ...]:
        """The knobs that are searched or have several values, with these trials' codes."""
        rows = [self._rows[number] for number in numbers]
        shown = [
            (position, name, codes.values)
            for position, (name, codes) in enumerate(self._codes.items())
            if len(codes.values) > 1 or name in self._searched
        ]
        return tuple(
            KnobColumn(name=name, unit=KNOBS[name].unit, values=tuple(values), codes=tuple(row[position] for row in rows))
            for position, name, values in shown
        )

    def constants(self) -> dict[str, Value]:
        """The knobs that are not searched and have the same value in all trials."""
        single = {name: codes.values[0] for name, codes in self._codes.items() if len(codes.values) == 1}
        return {name: value for name, value in single.items() if name not in self._searched and value != ""}


def columns(
    trials: Sequence[TrialRecord],
    words: Mapping[str, Codes],
    ranking: Ranking,
    placements: Mapping[int, AttemptPlacement],
    forecasts: Mapping[str, InitialForecast],
    epoch: datetime,
) -> PointColumns:
    """The columns of these trials. Rates and predictions have seven digits, enough for a figure."""
    results = [trial.result for trial in trials]
    rates = [result.samples_per_second if result is not None else None for result in results]
    places = [placements.get(trial.number) for trial in trials]
    predicted = [forecasts.get(trial.config_hash) for trial in trials]
    return PointColumns(
        number=tuple(trial.number for trial in trials),
        outcome=tuple(words["outcomes"].of_word(trial.outcome) for trial in trials),
        purpose=tuple(words["purposes"].of(trial.purpose.value) for trial in trials),
        fidelity=tuple(words["fidelities"].of(trial.fidelity) for trial in trials),
        repeat=tuple(trial.repeat for trial in trials),
        attempts=tuple(trial.attempts for trial in trials),
        eligible=tuple(int(ranking.may_win(trial)) for trial in trials),
        cause=tuple(
            words["causes"].of_word((result.rule or result.cause) if result is not None else None) for result in results
        ),
        rate=tuple(None if rate is None else _digits(rate.mean) for rate in rates),
        low=tuple(None if rate is None else _digits(rate.low) for rate in rates),
        high=tuple(None if rate is None else _digits(rate.high) for rate in rates),
        peak=tuple(None if result is None else result.peak_memory_bytes for result in results),
        predicted_rate=tuple(None if forecast is None else _digits(forecast.samples_per_second) for forecast in predicted),
        predicted_peak=tuple(None if forecast is None else int(forecast.peak_memory_bytes) for forecast in predicted),
        started=tuple(
            None if placement is None else round((placement.started - epoch).total_seconds(), 3) for placement in places
        ),
        finished=tuple(None if t.finished is None else round((t.finished - epoch).total_seconds(), 3) for t in trials),
        node=tuple(None if placement is None else words["nodes"].of_word(placement.node) for placement in places),
    )


def _digits(value: float) -> float:
    return float(f"{value:.7g}")
