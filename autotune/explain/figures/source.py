"""The data source of a job's figures; each part is read when the first figure needs it."""

from functools import cached_property
from typing import TYPE_CHECKING

from autotune.errors import AutotuneError, NoBestError
from autotune.explain.explanation.evidence import ExplanationEvidence, Forecast, evidence_of, question_of_job, trials_text
from autotune.explain.figures.points import JobPoints
from autotune.forecast.initial_forecast import InitialForecaster, initial_forecaster_of, unknown_model
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.prediction.cases.module_cases import predictable
from autotune.prediction.equations.coefficients import rates_for
from autotune.request.request import Objective
from autotune.session.resolve import session_of
from autotune.session.session import Session
from autotune.strategies.guided.prior import Prior
from autotune.wire.trials import Points
from executor.errors import ExecutorError
from search_spaces.errors import SearchSpaceError
from search_spaces.outcome import JobState
from search_spaces.trial import Interval
from storage.records import TrialRecord

if TYPE_CHECKING:
    from storage.store import Store


class FigureSource:
    """A job's rows as they were when the first figure read them. A part that is not available is None; `lacking` says why."""

    def __init__(self, store: "Store", job_id: str) -> None:
        """`job_id` may be a unique prefix.

        Raises:
            UnknownJobError: there is no such job.
        """
        self.store = store
        self.job = store.jobs.get(job_id)
        self._problem = ""

    @cached_property
    def snapshot(self) -> JobSnapshot:
        """The job's trials; their results have only the figures."""
        return read_snapshot(self.store, self.job.id)

    @cached_property
    def session(self) -> Session | None:
        """The resolved request; None: this version cannot read it."""
        try:
            return session_of(self.job)
        except (AutotuneError, SearchSpaceError, ExecutorError) as error:
            self._problem = str(error)
            return None

    @cached_property
    def points(self) -> Points | None:
        """The trials as columns; None: this version cannot read the job's request."""
        if self.session is None:
            return None
        return JobPoints(self.store, self.job, self.session, self.initial_forecaster).of(self.snapshot)

    @cached_property
    def evidence(self) -> ExplanationEvidence | None:
        """The input of an explanation; None: no trial has won yet."""
        try:
            return evidence_of(self.store, self.session, self.snapshot) if self.session is not None else None
        except NoBestError:
            return None

    @cached_property
    def forecast(self) -> Forecast | None:
        """The forecast after the job's trials; None: the equations do not know the model."""
        if self.evidence is not None:
            return self.evidence.outlook
        question = question_of_job(self.store, self.session) if self.session is not None else None
        if question is None or self.session is None:
            return None
        return Forecast(self.session, self.snapshot, Prior(rates=question.rates, source=question.rests_on))

    @cached_property
    def stand_in_forecast(self) -> Forecast | None:
        """The forecast for a transformer of the model's size after the job's trials; None: the request cannot be read."""
        if self.session is None:
            return None
        rates = rates_for(self.session.cluster, self.session.request.engine)
        return Forecast(self.session, self.snapshot, Prior(rates=rates))

    @cached_property
    def initial_forecaster(self) -> InitialForecaster | None:
        """The forecast before the job's first trial; None: the equations do not know the model."""
        return initial_forecaster_of(self.store, self.job.id, self.session) if self.session is not None else None

    @property
    def objective(self) -> Objective:
        """The job's objective; throughput if the request cannot be read."""
        return self.session.ranking.objective if self.session is not None else Objective.THROUGHPUT

    @property
    def unpredicted(self) -> str:
        """Why the equations do not know the model; empty: they do."""
        if self.session is None:
            return self.lacking()
        if predictable(self.session.model, self.session.space) is not None:
            return ""
        reason = unknown_model(self.session.model)
        return f"{reason[0].upper()}{reason[1:]}."

    def rate_of(self, trial: TrialRecord) -> Interval | None:
        """Samples/s of a search trial's configuration from all its measurements; None: it was not measured."""
        if self.evidence is not None:
            return self.evidence.verdict.rate(trial)
        return trial.result.samples_per_second if trial.result is not None else None

    def lacking(self, missing: str = "winner") -> str:
        """Why there is nothing to show, in one sentence."""
        if self.session is None:
            return f"This version cannot read the job's request: {self._problem}."
        if not self.snapshot.searched:
            return _WITHOUT_TRIALS.get(self.job.state, f"No trial has ended: {self.job.message or self.job.state.lower()}.")
        return f"There is no {missing}: {trials_text(self.snapshot)}."


_WITHOUT_TRIALS = {
    JobState.QUEUED: "The job waits for a worker: no trial has started.",
    JobState.RUNNING: "The job has begun: no trial has ended yet.",
}
