"""What was predicted of a job's configurations before its first trial: what its trials can fairly be held against."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.forecast.job_question import question_of_session
from autotune.prediction.equations.rates import rates_for
from autotune.prediction.equations.step import predict
from autotune.prediction.fitting.calibration import coefficients_from_benchmark
from autotune.prediction.planning.calibrated import benchmark_text, fingerprint
from autotune.prediction.planning.estimate import alike, learned
from autotune.prediction.planning.question import Question
from autotune.session.session import Session
from autotune.strategies.guided.prior import Prior
from search_spaces.plain import from_plain
from search_spaces.trial_config import TrialConfig
from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialForecast:
    """What was predicted of one configuration."""

    samples_per_second: float
    peak_memory_bytes: float
    """Of the fullest rank, as torch's allocator counts: what a trial measures."""


class Foresight:
    """Predicts for one job, as a form or a plan did before its first trial. What its own trials taught is left out, so that it
    says the same before and after them.
    """

    def __init__(self, question: Question) -> None:
        """`question`: with what was known before the job's first trial."""
        self._question = question

    @property
    def rests_on(self) -> str:
        """In words, what the predictions rest on."""
        return self._question.rests_on

    def of(self, configs: Sequence[TrialConfig]) -> list[InitialForecast]:
        """What is predicted of each configuration, in their order."""
        rates, peaks = np.empty(len(configs)), np.empty(len(configs))
        for places, cases in alike(self._question, configs):
            prediction = predict(cases, self._question.rates)
            seconds = prediction.seconds * learned(self._question, cases, [configs[place] for place in places])
            rates[places] = self._question.global_batch_size / seconds
            peaks[places] = prediction.memory.allocated
        return [
            InitialForecast(samples_per_second=rate, peak_memory_bytes=peak)
            for rate, peak in zip(rates.tolist(), peaks.tolist(), strict=True)
        ]


def foresight_of(store: Store, job_id: str, session: Session) -> Foresight | None:
    """What predicts for a job: what it kept as its knowledge when it began, else what was measured of its cluster.

    None: the model is a factory or a script, of whose shape the equations know nothing.
    """
    question = question_of_session(session)
    if question is None:
        return None
    kept = store.prior(job_id)
    prior = from_plain(Prior, kept) if kept is not None else _prior(store, question)
    return Foresight(dataclasses.replace(question, known=prior.rates, lessons=prior.lessons, rests_on=prior.source))


def _prior(store: Store, question: Question) -> Prior:
    """Of a job that keeps none: it has not begun, or an earlier version ran it."""
    shipped = rates_for(question.cluster, question.engine)
    newest = store.calibrations(fingerprint(question.cluster), limit=1)
    if not newest:
        return Prior(rates=shipped)
    rates = coefficients_from_benchmark(newest[0], question.cluster, question.engine, shipped)
    return Prior(rates=rates, source=benchmark_text(newest[0]))
