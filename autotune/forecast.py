"""Predictions for a job before its first trial: of its configurations, and its expected result and cost."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from autotune.errors import NothingFeasibleError
from autotune.loop.budget import job_seconds, most_measurements, trial_seconds_band
from autotune.prediction.cases.config_cases import predictable
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.step import predict
from autotune.prediction.fitting.calibration import coefficients_from_benchmark
from autotune.prediction.planning.calibrated import asked_here, benchmark_text, fingerprint
from autotune.prediction.planning.consequences import Consequence, consequences, estimate_with
from autotune.prediction.planning.estimate import StepEstimate, alike, estimates, learned
from autotune.prediction.planning.plan import PlanObjective, PlanOptions, plan
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.scan import Bounds
from autotune.request.job_fields import Objective
from autotune.session.knowledge import learned_of
from autotune.session.session import Session
from autotune.strategies.guided.prior import Prior
from search_spaces.errors import SpaceTooLargeError
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model
from search_spaces.plain import from_plain
from search_spaces.spaces import Pin
from search_spaces.trial_config import TrialConfig

if TYPE_CHECKING:
    from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialForecast:
    """The prediction for one configuration."""

    samples_per_second: float
    peak_memory_bytes: float
    """Peak of the fullest rank in torch's allocator, as trials measure it."""


class InitialForecaster:
    """Predicts for one job as a form or a plan did before its first trial. It does not learn from the job's own trials, so its
    predictions are the same before and after them.
    """

    def __init__(self, question: Question) -> None:
        """`question`: includes the prior from before the job's first trial."""
        self._question = question

    @property
    def calibration_source(self) -> str:
        """The data behind the predictions, in words."""
        return self._question.calibration_source

    def of(self, configs: Sequence[TrialConfig]) -> list[InitialForecast]:
        """Return the prediction for each configuration, in order."""
        rates, peaks = np.empty(len(configs)), np.empty(len(configs))
        for places, cases in alike(self._question, configs):
            prediction = predict(cases, self._question.rates)
            seconds = prediction.seconds * learned(self._question, cases, [configs[index] for index in places])
            rates[places] = self._question.global_batch_size / seconds
            peaks[places] = prediction.memory.allocated
        return [
            InitialForecast(samples_per_second=rate, peak_memory_bytes=peak)
            for rate, peak in zip(rates.tolist(), peaks.tolist(), strict=True)
        ]


def initial_forecaster_of(store: "Store", job_id: str, session: Session) -> InitialForecaster | None:
    """Return the forecaster of a job: with the prior that the job stored when it began, else with its cluster's calibration.

    None: the model is a script, or a module without a profile: unknown to the equations.
    """
    question = question_of_session(session)
    if question is None:
        return None
    stored_prior = store.jobs.prior(job_id)
    prior = from_plain(Prior, stored_prior) if stored_prior is not None else _prior(store, question)
    return InitialForecaster(
        dataclasses.replace(question, coefficients=prior.rates, residuals=prior.residuals, calibration_source=prior.source)
    )


def _prior(store: "Store", question: Question) -> Prior:
    """The prior of a job that stored none: it has not begun."""
    shipped = rates_for(question.cluster, question.engine)
    newest = store.calibrations.newest(fingerprint(question.cluster), limit=1)
    if not newest:
        return Prior(rates=shipped)
    rates = coefficients_from_benchmark(newest[0], question.cluster, question.engine, shipped)
    return Prior(rates=rates, source=benchmark_text(newest[0]))


def question_of_session(session: Session) -> Question | None:
    """Return the session's model, cluster and workload as a question, without pins and with the shipped coefficients.

    None: the model is a script, or a module without a profile: unknown to the equations.
    """
    model = predictable(session.model, session.space)
    if model is None:
        return None
    request = session.request
    return Question(
        model=model, cluster=session.cluster, engine=request.engine, global_batch_size=request.global_batch_size,
        sequence_length=request.sequence_length, space=request.space, simple=request.simple, nvme_path=request.nvme_path,
        training_steps=request.training_steps,
        document_lengths=request.document_lengths,
    )  # fmt: skip


def unknown_model(model: Model) -> str:
    """Why `question_of_session` has no question for a model, in a clause."""
    if isinstance(model, CommandModel):
        return "the model is a script, whose shape the equations do not know"
    reason = (isinstance(model, FactoryModel) and model.no_profile) or "it has no profile in every precision of the space"
    return f"the equations do not know the module ({reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobExpectation:
    """Predictions for a job."""

    trials: int
    """Most trials that run on a device: search trials, controls and confirmations."""
    baseline: StepEstimate | None
    """None: there are no predictions for such a model."""
    best: StepEstimate | None
    """The best of the space, among those that probably fit; None: `note` says why."""
    trial_seconds: tuple[float, float] | None
    """Seconds of a trial on warm ranks: of the faster of best and baseline with steady steps, and of the slower with noisy
    steps."""
    seconds: tuple[float, float] | None
    """Seconds of the whole job: search, controls, confirmations and the start of its ranks."""
    calibration_source: str
    """The data behind the predictions, in words; empty: there are no predictions."""
    note: str
    """Why predictions, or that of the best, are missing; empty: none is."""
    consequences: tuple[Consequence, ...] = ()
    """What the best, or the baseline if there is no best, is at other values of what nobody stated."""


def expected(session: Session, store: "Store", bounds: Bounds) -> JobExpectation:
    """Predict the result of the session's job, and the duration of its trials. Runs nothing.

    Args:
        session: the job's session.
        store: has the calibration of the cluster.
        bounds: limits of the scan of the space.
    """
    request = session.request
    trials = most_measurements(request.trials, request.control_every, request.confirm_repeats).total
    question = question_of_session(session)
    if question is None:
        note = f"{unknown_model(session.model)}: nothing is predicted before the first trial"
        return JobExpectation(
            trials=trials, baseline=None, best=None, trial_seconds=None, seconds=None, calibration_source="", note=note
        )
    borrowed = learned_of(request.knowledge, store, session.cluster, request.engine, session.model)
    question = asked_here(store, _narrowed(question, session), borrowed)
    (baseline,) = estimates(question, session.baselines[:1])
    best, note = _best(question, session, bounds)
    answer = best or baseline
    bands = [trial_seconds_band(estimate.step_seconds.mean, request.fidelity) for estimate in (answer, baseline)]
    trial_seconds = min(low for low, _ in bands), max(high for _, high in bands)
    return JobExpectation(
        trials=trials,
        baseline=baseline,
        best=best,
        trial_seconds=trial_seconds,
        seconds=job_seconds(request, session.world_size, trial_seconds),
        calibration_source=question.calibration_source,
        note=note,
        consequences=tuple(consequences(request.resolved_assumed, answer, partial(estimate_with, question, answer.config))),
    )


def _narrowed(question: Question, session: Session) -> Question:
    """Restrict the question to the job's own space, and to the memory that its trials may use."""
    cluster, limit = session.cluster, session.ranking.memory_limit_bytes
    if limit is not None:
        device = dataclasses.replace(cluster.device, memory_bytes=min(limit, cluster.device.memory_bytes))
        cluster = dataclasses.replace(cluster, device=device)
    pins: dict[str, Pin] = {name: list(values) for name, values in session.space.domains.items()}
    return dataclasses.replace(question, cluster=cluster, pins=pins)


def _best(question: Question, session: Session, bounds: Bounds) -> tuple[StepEstimate | None, str]:
    objective = PlanObjective.MEMORY if session.request.objective is Objective.MEMORY else PlanObjective.THROUGHPUT
    try:
        plan_result = plan(question, PlanOptions(objective=objective, top=1), bounds)
    except (NothingFeasibleError, SpaceTooLargeError) as error:
        return None, f"{error.problem}; {error.remedy}"
    return plan_result.plans[0].estimate, ""
