"""Expected step time of a trial, to distinguish a hang from a slow step before its first step has ended."""

import math
from collections import deque
from collections.abc import Mapping
from itertools import islice
from statistics import median
from typing import Any

from autotune.objective.ranking import rate
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.prediction.cases.config_cases import cases_of, predictable
from autotune.prediction.equations.coefficients import Coefficients, rates_for
from autotune.prediction.equations.step import seconds_of
from autotune.session.session import Session
from autotune.strategies.guided.prior import Prior
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.plain import from_plain
from search_spaces.trial_config import TrialConfig

REMEMBERED = 64
"""Number of latest trials whose ratio is used. More would not improve the median, and a resumed job recomputes each."""


class StepForecast:
    """Predicted step times, scaled by the median ratio of measured to predicted step time of the job's trials.

    A machine differs from its data sheet by a common factor, and the median ignores single trials that other jobs disturbed.
    Each call examines only the closed trials that are new since the last call.
    """

    def __init__(self, session: Session, model: ModelSpec | FactoryModel, rates: Coefficients) -> None:
        self._session, self._model, self._rates = session, model, rates
        self._seen = 0
        self._ratios: deque[float] = deque(maxlen=REMEMBERED)

    def seconds(self, config: TrialConfig, snapshot: JobSnapshot) -> float | None:
        """Expected seconds of a step of the whole global batch; None: the prediction is not finite."""
        first = max(self._seen, snapshot.searched_count - REMEMBERED)
        new = islice(snapshot.closed.searched, first, snapshot.searched_count)
        timed = [trial for trial in new if trial.outcome is Outcome.OK and rate(trial) > 0]
        batch = self._session.request.global_batch_size
        self._ratios += [batch / rate(trial) / self._predicted(trial.config) for trial in timed]
        self._seen = snapshot.searched_count
        expected = self._predicted(config) * (median(self._ratios) if self._ratios else 1.0)
        return expected if 0 < expected < math.inf else None

    def _predicted(self, config: TrialConfig) -> float:
        request = self._session.request
        cases = cases_of(self._model, self._session.cluster, request.workload, [config], request.engine)
        return float(seconds_of(cases, self._rates)[0])


def forecast_of(session: Session, prior: Mapping[str, Any] | None) -> StepForecast | None:
    """Return a job's forecast; None: the equations do not know its model.

    `prior`: the job's stored prior from before its first trial, if any.
    """
    model = predictable(session.model, session.space)
    if model is None:
        return None
    rates = from_plain(Prior, prior).rates if prior is not None else rates_for(session.cluster, session.request.engine)
    return StepForecast(session, model, rates)
