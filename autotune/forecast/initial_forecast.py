"""Predictions for a job's configurations from before its first trial, for a fair comparison with its trials."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autotune.prediction.cases.module_cases import predictable
from autotune.prediction.equations.coefficients import rates_for
from autotune.prediction.equations.step import predict
from autotune.prediction.fitting.calibration import coefficients_from_benchmark
from autotune.prediction.planning.calibrated import benchmark_text, fingerprint
from autotune.prediction.planning.estimate import alike, learned
from autotune.prediction.planning.question import Question
from autotune.session.session import Session
from autotune.strategies.guided.prior import Prior
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model
from search_spaces.plain import from_plain
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
    def rests_on(self) -> str:
        """The data behind the predictions, in words."""
        return self._question.rests_on

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
        dataclasses.replace(question, coefficients=prior.rates, lessons=prior.lessons, rests_on=prior.source)
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
