"""What the equations say of any configuration of a job, corrected by the job's own trials (the belief of guided search)."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property

from autotune.outcome.job_snapshot import JobSnapshot
from autotune.request.request import Objective
from autotune.session.session import Session
from autotune.strategies.guided.described import Described, Pool
from autotune.strategies.guided.feasibility import Feasibility
from autotune.strategies.guided.observations import Observations, speaking, told_by
from autotune.strategies.guided.prior import Prior
from autotune.strategies.guided.setting import setting_of
from autotune.strategies.guided.space_forecaster import SpaceForecaster
from autotune.strategies.guided.surrogate import Surrogate
from search_spaces.cluster import with_memory
from search_spaces.trial_config import TrialConfig


class Forecast:
    """Rates and memory of configurations of one job, as predicted after its trials, whatever the job's objective.

    Lessons of other jobs are left out where the prior has none: the job's own trials say the same of it, and more.
    """

    def __init__(self, session: Session, book: JobSnapshot, prior: Prior) -> None:
        ranking = dataclasses.replace(session.ranking, objective=Objective.THROUGHPUT)
        self._setting = setting_of(session.model, session.space, session.request.engine, ranking, session.request.fidelity)
        self._prior, self._searched = prior, session.without_environment_stage(book.searched)
        self._forecaster = SpaceForecaster(self._setting, prior)

    @cached_property
    def told(self) -> Observations:
        """What the job's trials told."""
        spoken, ranking = speaking(self._searched), self._setting.ranking
        return told_by(spoken, self.describe([trial.config for trial in spoken]), ranking.value, ranking.score)

    @cached_property
    def belief(self) -> Surrogate:
        """Rates after the trials."""
        return Surrogate(self.told)

    @cached_property
    def feasibility(self) -> Feasibility:
        """How probable it is that a configuration runs, after the trials."""
        return Feasibility(self.told)

    def describe(self, configs: Sequence[TrialConfig]) -> Described:
        """What is predicted of configurations."""
        return self._forecaster.describe(configs)

    def pool(self, memory: float) -> Pool:
        """The job's candidates where each rank has so many times as much memory.

        Raises:
            SpaceTooLargeError: there are more than can be looked at.
        """
        setting, cluster = self._setting, self._setting.cluster
        limit = setting.ranking.memory_limit_bytes
        ranking = dataclasses.replace(setting.ranking, memory_limit_bytes=None if limit is None else int(limit * memory))
        space = dataclasses.replace(setting.space, cluster=with_memory(cluster, memory))
        return SpaceForecaster(dataclasses.replace(setting, space=space, ranking=ranking), self._prior).pool(space)
