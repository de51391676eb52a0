"""A trial of a job: its plan, its expected step time, and what follows from its result."""

import dataclasses
import math
import re
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from autotune.objective.intervals import Spread
from autotune.objective.ranking import rate
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.prediction.cases.config_cases import cases_of, predictable
from autotune.prediction.equations.coefficients import Coefficients, rates_for
from autotune.prediction.equations.step import seconds_of
from autotune.session.feasible import space_problem
from autotune.session.session import Session
from autotune.strategies.guided.prior import Prior
from search_spaces.failure import FailureTable
from search_spaces.models.model import FactoryModel, ModelSpec
from search_spaces.outcome import Outcome, Purpose
from search_spaces.plain import from_plain
from search_spaces.training.states import states_lower_bound_bytes
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import FULL, AttemptState, TrialRecord

if TYPE_CHECKING:
    from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTrial:
    """A trial to run, before it has a row in the store."""

    config: TrialConfig
    purpose: Purpose = Purpose.SEARCH
    repeat: int = 0
    fidelity: str = FULL


def refusal(session: Session, planned: PlannedTrial) -> TrialResult | None:
    """Return why the configuration cannot run at all; None: it may be tried.

    A configuration is INFEASIBLE if its parameters, gradients and optimizer state already exceed a rank's memory. Their size is
    a lower bound of the peak.
    """
    if planned.purpose is not Purpose.SEARCH:
        return None
    least = states_lower_bound_bytes(planned.config, session.model, session.world_size, session.space.capability)
    available = session.cluster.most_memory_bytes
    if least > available:
        message = f"its states need at least {least:,} bytes on a rank, which has {available:,}"
        return TrialResult(attempt="", outcome=Outcome.INFEASIBLE, rule="states-fit", message=message)
    problem = space_problem(session.request, session.cluster, session.model, planned.config)
    if problem is not None:
        return TrialResult(attempt="", outcome=Outcome.INVALID, rule="nvme-space", message=problem)
    refusals = session.space.check(planned.config)
    if not refusals and session.extrapolation is not None and (refused := session.extrapolation.refusal(planned.config)):
        refusals = [refused]
    if refusals:
        message = f"{refusals[0].message}; {refusals[0].remedy}"
        return TrialResult(attempt="", outcome=Outcome.INVALID, rule=refusals[0].rule, message=message)
    return None


def with_stated_interval(result: TrialResult, spread: Spread) -> TrialResult:
    """Return the result with the interval that combines its own error and the spread between repeats.

    A PRUNED trial's interval already includes both: it was used to end the trial, and its upper end is the bound of the rate.
    """
    if result.samples_per_second is None or result.outcome is Outcome.PRUNED:
        return result
    interval = spread.interval(result.samples_per_second.mean, result.within_relative_error)
    return dataclasses.replace(result, samples_per_second=interval)


class Verifying:
    """Determines from the stored attempts which planned trials verify a failure (`FailureRow.verify`)."""

    def __init__(self, store: "Store", table: FailureTable) -> None:
        self._store, self._table = store, table
        self._known: dict[tuple[int, int], bool] = {}

    def is_verification(self, trial: TrialRecord) -> bool:
        """Whether the trial's next attempt verifies a failure."""
        key = (trial.number, trial.attempts)
        if trial.attempts and key not in self._known:
            attempts = self._store.attempts.of(trial.job_id, trial.number)
            retried = [attempt.result for attempt in attempts if attempt.state is AttemptState.RETRIED and attempt.result]
            rows = [self._table.row(result.cause) for result in retried]
            self._known[key] = any(row is not None and row.verify for row in rows)
        return self._known.get(key, False)

    def startable(self, trials: list[TrialRecord], running: Collection[TrialRecord]) -> list[TrialRecord]:
        """Return the trials that may start now: a verification waits until nothing runs, and nothing starts until it has ended.

        The other trials stay planned.
        """
        if any(map(self.is_verification, running)):
            return []
        verification = next(filter(self.is_verification, trials), None)
        if verification is None:
            return trials
        return [] if running else [verification]


def kind_of_failure(result: TrialResult) -> tuple[str, str | None, str]:
    """Return a key that is equal for failures of the same kind: outcome, cause, and the message without its numbers.

    Ranks, shapes, sizes, ports and addresses are numbers that differ between configurations and attempts.
    """
    return result.outcome.value, result.cause, re.sub(r"0x[0-9a-fA-F]+|\d+", "", result.message)


class StepForecast:
    """Predicted step times, scaled by the median ratio of measured to predicted step time of the job's trials.

    A machine differs from its data sheet by a common factor, and the median ignores single trials that other jobs disturbed.
    Each call examines only the closed trials that are new since the last call.
    """

    _REMEMBERED = 64
    """Number of latest trials whose ratio is used. More would not improve the median, and a resumed job recomputes each."""

    def __init__(self, session: Session, model: ModelSpec | FactoryModel, rates: Coefficients) -> None:
        self._session, self._model, self._rates = session, model, rates
        self._seen = 0
        self._ratios: deque[float] = deque(maxlen=self._REMEMBERED)

    def seconds(self, config: TrialConfig, snapshot: JobSnapshot) -> float | None:
        """Expected seconds of a step of the whole global batch; None: the prediction is not finite."""
        first = max(self._seen, snapshot.searched_count - self._REMEMBERED)
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
