"""The input of an explanation: trials, the winner, and predictions corrected by the trials."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from autotune.errors import NoBestError
from autotune.forecast import question_of_session
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.outcome.standings import with_whole_result
from autotune.outcome.verdict import JobVerdict, decide
from autotune.prediction.fitting.residuals import NOISE
from autotune.prediction.planning.calibrated import asked_here
from autotune.prediction.planning.question import Question
from autotune.request.job_fields import Objective
from autotune.session.resolve import session_of
from autotune.session.session import Session
from autotune.strategies.guided.described import Array, CandidatePool, Described, Observations, observe, select_informative
from autotune.strategies.guided.prior import Prior, setting_of
from autotune.strategies.guided.space_forecaster import SpaceForecaster
from autotune.strategies.guided.surrogate import Feasibility, Surrogate
from search_spaces.clusters.cluster import with_memory
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

if TYPE_CHECKING:
    from storage.store import Store


class Forecast:
    """Rates and memory of one job's configurations, predicted after its trials, for any objective of the job.

    Residuals of other jobs are used only if the prior has them: the job's own trials contain the same information, and more.
    """

    def __init__(self, session: Session, snapshot: JobSnapshot, prior: Prior) -> None:
        ranking = dataclasses.replace(session.ranking, objective=Objective.THROUGHPUT)
        self._setting = setting_of(session.model, session.space, session.request.engine, ranking, session.request.fidelity)
        self._prior, self._searched = prior, session.without_environment_stage(snapshot.searched)
        self._forecaster = SpaceForecaster(self._setting, prior)

    @cached_property
    def observations(self) -> Observations:
        """The observations from the job's trials."""
        informative, ranking = select_informative(self._searched), self._setting.ranking
        return observe(informative, self.describe([trial.config for trial in informative]), ranking.value, ranking.score)

    @cached_property
    def surrogate(self) -> Surrogate:
        """The model of rates after the trials."""
        return Surrogate(self.observations)

    @cached_property
    def feasibility(self) -> Feasibility:
        """The probability that a configuration runs, after the trials."""
        return Feasibility(self.observations)

    def describe(self, configs: Sequence[TrialConfig]) -> Described:
        """Predict configurations."""
        return self._forecaster.describe(configs)

    def pool(self, memory: float) -> CandidatePool:
        """The job's candidates if each rank had `memory` times as much memory.

        Raises:
            SpaceTooLargeError: there are too many candidates to evaluate.
        """
        setting, cluster = self._setting, self._setting.cluster
        limit = setting.ranking.memory_limit_bytes
        ranking = dataclasses.replace(setting.ranking, memory_limit_bytes=None if limit is None else int(limit * memory))
        space = dataclasses.replace(setting.space, cluster=with_memory(cluster, memory))
        return SpaceForecaster(dataclasses.replace(setting, space=space, ranking=ranking), self._prior).pool(space)


@dataclass(frozen=True, kw_only=True)
class ExplanationEvidence:
    """What was measured, and the question to the equations."""

    session: Session
    snapshot: JobSnapshot
    verdict: JobVerdict
    winner: TrialRecord
    """The winner's search trial, with its whole result."""
    question: Question | None
    """The question to the equations, with what the database knows about the cluster; None: they do not know the model."""
    differing_knobs: dict[int, list[str]] = field(default_factory=dict)
    """Search trial -> knobs in which it differs from the winner; empty: not computed yet (`neighbours.all_differing_knobs`)."""

    @property
    def config(self) -> TrialConfig:
        """The winner's configuration."""
        return self.winner.config

    @cached_property
    def rate(self) -> Interval:
        """The winner's measured samples/s."""
        return self.rate_of(self.winner)

    @cached_property
    def step_seconds(self) -> float:
        """The winner's measured seconds per step."""
        return self.session.request.global_batch_size / self.rate.mean

    def rate_of(self, trial: TrialRecord) -> Interval:
        """Samples/s of a measured search trial's configuration: the same figure that lists and documents state."""
        rate = self.verdict.rate(trial)
        assert rate is not None  # it was measured
        return rate

    def speedup(self, other: TrialRecord) -> Interval:
        """The winner's samples/s divided by those of another measured search trial."""
        ratio = self.verdict.standings.ratio(self.winner, other)
        assert ratio is not None  # both were measured
        return ratio

    @cached_property
    def outlook(self) -> "WinnerOutlook | None":
        """The predictions; None: the equations do not know the model."""
        return None if self.question is None else WinnerOutlook(self, self.question)


class WinnerOutlook(Forecast):
    """Predictions for any configuration relative to the winner: errors of the equations that the winner shares with its
    neighbours cancel.
    """

    def __init__(self, evidence: ExplanationEvidence, question: Question) -> None:
        super().__init__(evidence.session, evidence.snapshot, Prior(rates=question.rates, source=question.calibration_source))
        self._own = float(self.surrogate.mean(self.describe([evidence.config]))[0])

    def log_speedups(self, described: Described) -> tuple[Array, Array]:
        """Logarithm of the winner's rate over each rate, and its standard deviation; noise is included."""
        mean, spread = self.surrogate.mean_and_spread(described)
        return self._own - mean, np.hypot(spread, math.sqrt(2) * NOISE)

    def slower(self, described: Described) -> Array:
        """Logarithm of the winner's rate over each rate."""
        ratios: Array = self._own - self.surrogate.mean(described)
        return ratios


def gather(store: "Store", job_id: str) -> ExplanationEvidence:
    """Read everything from the job's rows.

    Raises:
        UnknownJobError: there is no such job.
        NoBestError: no trial won; the message says how the trials ended.
        JobNotResumableError: this version cannot read the job's request.
        SearchSpaceError: the request of an old job names something that no longer exists.
    """
    snapshot = read_snapshot(store, job_id)
    return evidence_of(store, session_of(snapshot.job), snapshot)


def evidence_of(store: "Store", session: Session, snapshot: JobSnapshot) -> ExplanationEvidence:
    """As `gather`, for a job that was read before.

    Raises:
        NoBestError: no trial won.
    """
    verdict = decide(snapshot, session.ranking, session.prior, session.baselines)
    if verdict is None:
        raise NoBestError(
            "job", f"{snapshot.job.id} has no winner to explain: {trials_text(snapshot)}", "look at `autotune show`"
        )
    return ExplanationEvidence(
        session=session,
        snapshot=snapshot,
        verdict=verdict,
        winner=with_whole_result(snapshot, verdict.best),
        question=question_of_job(store, session),
    )


def trials_text(snapshot: JobSnapshot) -> str:
    """How the trials ended: `8 trials, 5 INFEASIBLE, 3 FAILED`."""
    ended = Counter(trial.outcome.value for trial in snapshot.searched if trial.outcome)
    count = len(snapshot.searched)
    return ", ".join([f"{count or 'no'} trial{'s' * (count != 1)}", *(f"{n} {name}" for name, n in ended.most_common())])


def question_of_job(store: "Store", session: Session) -> Question | None:
    """A job's question to the equations, with what the database knows about its cluster; None: they do not know its model."""
    question = question_of_session(session)
    return None if question is None else asked_here(store, question)
