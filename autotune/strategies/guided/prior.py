"""Coefficients of a job: known before its first trial, with residuals of earlier jobs, and fitted to its own first trials."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autotune.objective.ranking import rate
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.coefficients import Coefficients, rates_for
from autotune.prediction.fitting.lessons import Lesson
from autotune.prediction.fitting.trial_fit import fit_time
from autotune.prediction.fitting.trial_history import Runs, jobs_elsewhere
from autotune.prediction.planning.calibrated import Borrowed, calibrated
from autotune.prediction.planning.question import SHIPPED
from autotune.strategies.guided.observations import noise_of
from autotune.strategies.guided.setting import JobSetting
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.outcome import Outcome
from storage.records import TrialRecord

if TYPE_CHECKING:
    from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Frozen when a job begins, so that a resumed job makes the same decisions."""

    rates: Coefficients
    lessons: tuple[Lesson, ...] = ()
    source: str = SHIPPED
    """The source of the coefficients, in words."""
    left_out: int = 0
    """Jobs in the database that ran on other hardware and are not used."""

    @property
    def note(self) -> str:
        """A sentence for users who start a job."""
        text = f"predictions rest on {self.source}"
        if self.lessons:
            text += f", with residuals learned from {len(self.lessons)} of them"
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
        lessons=calibration.lessons,
        source=calibration.source,
        left_out=jobs_elsewhere(store, cluster, engine),
    )


def shipped_prior(cluster: ClusterSpec, engine: str) -> Prior:
    """The prior without a database."""
    return Prior(rates=rates_for(cluster, engine))


MILESTONES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of trials after which coefficients are refitted. In between, residuals are learned candidate by candidate."""
REPEATS = 0.08
"""Standard deviation of the logarithm of a rate between repeated trials, beyond the noise measured within each."""


def milestone(count: int) -> int:
    """The last milestone that this many trials have reached; 0: none."""
    index = bisect.bisect_right(MILESTONES, count)
    return MILESTONES[index - 1] if index else 0


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
    return Runs(
        cases=cases_of(setting.model, setting.cluster, setting.workload, configs, setting.engine), configs=tuple(configs),
        keys=tuple(config.hash for config in configs), peaks=np.full(len(trials), np.nan), repeats=np.ones(len(trials)),
        seconds=np.array([setting.workload.global_batch_size / rate(trial) for trial in trials]),
        noise=np.array([np.hypot(noise_of(trial), REPEATS) for trial in trials]),
    )  # fmt: skip
