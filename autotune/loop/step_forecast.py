"""How long a step of a trial is expected to take, in time to tell a hang from a slow step before the trial has made one."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any

from autotune.objective.ranking import rate
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.rates import rates_for
from autotune.prediction.equations.step import seconds_of
from autotune.session.session import Session
from autotune.strategies.guided.prior import Prior
from search_spaces.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

REMEMBERED = 64
"""Trials whose ratio counts, the last ones: the median of more says no more, and a job that is resumed looks at each anew."""


class StepForecast:
    """Predictions of the equations, times what the job's trials took over what was predicted of them: the median of them.

    The median, for a machine is faster or slower than its data sheet in everything, and one trial that met a neighbour says
    nothing of the next. Of closed trials only those are looked at that are new since the last time.
    """

    def __init__(self, session: Session, model: ModelSpec, rates: Coefficients) -> None:
        self._session, self._model, self._rates = session, model, rates
        self._looked_at = 0
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)

    def seconds(self, config: TrialConfig, book: JobSnapshot) -> float | None:
        """Of a step of the whole global batch; None: nothing finite is predicted."""
        first = max(self._looked_at, book.searched_count - REMEMBERED)
        self._ratios += self._measured_over_predicted([*islice(book.closed.searched, first, book.searched_count)])
        self._looked_at = book.searched_count
        expected = self._predicted(config) * (median(self._ratios) if self._ratios else 1.0)
        return expected if 0 < expected < math.inf else None

    def _measured_over_predicted(self, trials: Sequence[TrialRecord]) -> list[float]:
        batch = self._session.request.global_batch_size
        timed = [trial for trial in trials if trial.outcome is Outcome.OK and rate(trial) > 0]
        return [batch / rate(trial) / self._predicted(trial.config) for trial in timed]

    def _predicted(self, config: TrialConfig) -> float:
        request = self._session.request
        cases = cases_of(self._model, self._session.cluster, request.workload, [config], request.engine)
        return float(seconds_of(cases, self._rates)[0])


def forecast_of(session: Session, model: ModelSpec, prior: Mapping[str, Any] | None) -> StepForecast:
    """The forecast of a job for this model; `prior`: what the job knew before its first trial, where it kept that."""
    rates = from_plain(Prior, prior).rates if prior is not None else rates_for(session.cluster, session.request.engine)
    return StepForecast(session, model, rates)
