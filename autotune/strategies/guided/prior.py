"""What a job optimises, and what predictions know before its first trial."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autotune.objective.ranking import Ranking, rate
from autotune.prediction.cases.config_cases import cases_of, predictable, transformer_of
from autotune.prediction.equations.coefficients import Coefficients, rates_for
from autotune.prediction.fitting.residuals import EarlierResidual
from autotune.prediction.fitting.trial_fit import Runs, fit_time, jobs_elsewhere
from autotune.prediction.planning.calibrated import Borrowed, calibrated
from autotune.prediction.planning.question import SHIPPED
from autotune.request.job_fields import Objective
from autotune.strategies.guided.described import noise_of
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.space import SearchSpace
from search_spaces.trial import Fidelity, Workload
from storage.records import TrialRecord

if TYPE_CHECKING:
    from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetting:
    """The setting of a job; constant while it runs."""

    model: ModelSpec | FactoryModel
    """A user's module has a profile."""
    space: SearchSpace
    engine: str
    ranking: Ranking
    fidelity: Fidelity

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster on which trials run."""
        return self.space.cluster

    @property
    def workload(self) -> Workload:
        """The workload of every trial."""
        return self.space.workload

    @property
    def memory_share(self) -> float:
        """Share of memory in the maximised value, (1 - share) log rate - share log peak: 1 if the smallest peak wins."""
        return 1.0 if self.ranking.objective is Objective.MEMORY else self.ranking.memory_share

    @property
    def room(self) -> float:
        """Bytes that a rank may use to run and to be able to win."""
        return min(self.cluster.device.memory_bytes, self.ranking.capacity_bytes)


def setting_of(model: Model, space: SearchSpace, engine: str, ranking: Ranking, fidelity: Fidelity) -> JobSetting:
    """Return the setting of a job; a script, or a module without a profile, is predicted as a transformer of its size."""
    predicted_model = predictable(model, space)
    if predicted_model is None:
        assert not isinstance(model, ModelSpec)
        stages = 1
        if isinstance(model, CommandModel):  # each of the most stages in the space has at least one layer
            names = ("pipeline_parallel_size", "virtual_stages")
            stages = math.prod(max(map(int, space.domains.get(name, (1,)))) for name in names)
        predicted_model = transformer_of(model, space.workload.sequence_length, stages)
    return JobSetting(model=predicted_model, space=space, engine=engine, ranking=ranking, fidelity=fidelity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Frozen when a job begins, so that a resumed job makes the same decisions."""

    rates: Coefficients
    residuals: tuple[EarlierResidual, ...] = ()
    source: str = SHIPPED
    """The source of the coefficients, in words."""
    left_out: int = 0
    """Jobs in the database that ran on other hardware and are not used."""

    @property
    def note(self) -> str:
        """A sentence for users who start a job."""
        text = f"predictions rest on {self.source}"
        if self.residuals:
            text += f", with residuals learned from {len(self.residuals)} of them"
        if self.left_out:
            text += f"; left out, because they ran on other hardware: {self.left_out} job{'s' * (self.left_out > 1)}"
        return text


def learn_prior(
    store: "Store", cluster: ClusterSpec, engine: str, earlier: Sequence[Runs] = (), borrowed: Borrowed | None = None
) -> Prior:
    """Learn from the database: the cluster's micro-benchmark, and trials on the same hardware and engine.

    Args:
        store: the database.
        cluster: where the job runs.
        engine: the engine of the job.
        earlier: trials from other sources; they precede those of the database.
        borrowed: what measurements by others add.
    """
    calibration = calibrated(store, cluster, engine, rates_for(cluster, engine), earlier, borrowed)
    return Prior(
        rates=calibration.rates,
        residuals=calibration.residuals,
        source=calibration.source,
        left_out=jobs_elsewhere(store, cluster, engine),
    )


def shipped_prior(cluster: ClusterSpec, engine: str) -> Prior:
    """The prior without a database."""
    return Prior(rates=rates_for(cluster, engine))


def milestone(count: int) -> int:
    """The last milestone that this many trials have reached; 0: none."""
    # Numbers of trials after which coefficients are refitted. In between, residuals are learned candidate by candidate.
    milestones = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    index = bisect.bisect_right(milestones, count)
    return milestones[index - 1] if index else 0


def timed_trials(history: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Trials whose step time was measured."""
    return [trial for trial in history if trial.outcome is Outcome.OK and rate(trial) > 0]


def fitted_to(timed: Sequence[TrialRecord], setting: JobSetting, before: Coefficients) -> Coefficients:
    """The most probable coefficients given these trials, with `before` as the prior."""
    alike: dict[tuple[str, str], list[TrialRecord]] = {}
    for trial in timed:
        alike.setdefault((trial.config.precision, trial.config.attention_backend), []).append(trial)
    return fit_time([_runs(trials, setting) for trials in alike.values()], before)


def _runs(trials: Sequence[TrialRecord], setting: JobSetting) -> Runs:
    configs = [trial.config for trial in trials]
    # Standard deviation of the logarithm of a rate between repeated trials, beyond the noise measured within each.
    return Runs(
        cases=cases_of(setting.model, setting.cluster, setting.workload, configs, setting.engine), configs=tuple(configs),
        keys=tuple(config.hash for config in configs), peaks=np.full(len(trials), np.nan), repeats=np.ones(len(trials)),
        seconds=np.array([setting.workload.global_batch_size / rate(trial) for trial in trials]),
        noise=np.array([np.hypot(noise_of(trial), 0.08) for trial in trials]),
    )  # fmt: skip
