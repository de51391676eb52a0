"""Predictions for any configuration of a job, corrected by the job's own trials with the surrogate of guided search."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

from autotune.outcome.job_snapshot import JobSnapshot
from autotune.request.request import Objective
from autotune.session.session import Session
from autotune.strategies.guided.described import Described, Pool
from autotune.strategies.guided.feasibility import Feasibility
from autotune.strategies.guided.observations import Observations, observe, select_informative
from autotune.strategies.guided.prior import Prior
from autotune.strategies.guided.setting import setting_of
from autotune.strategies.guided.space_forecaster import SpaceForecaster
from autotune.strategies.guided.surrogate import Surrogate
from search_spaces.clusters.cluster import with_memory
from search_spaces.trial_config import TrialConfig


class Forecast:
    """Rates and memory of one job's configurations, predicted after its trials, for any objective of the job.

    Lessons from other jobs are used only if the prior has them: the job's own trials contain the same information, and more.
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

    def pool(self, memory: float) -> Pool:
        """The job's candidates if each rank had `memory` times as much memory.

        Raises:
            SpaceTooLargeError: there are too many candidates to evaluate.
        """
        setting, cluster = self._setting, self._setting.cluster
        limit = setting.ranking.memory_limit_bytes
        ranking = dataclasses.replace(setting.ranking, memory_limit_bytes=None if limit is None else int(limit * memory))
        space = dataclasses.replace(setting.space, cluster=with_memory(cluster, memory))
        return SpaceForecaster(dataclasses.replace(setting, space=space, ranking=ranking), self._prior).pool(space)
