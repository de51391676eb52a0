"""A job's session: everything that its request names, resolved and checked."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.objective.intervals import Spread
from autotune.objective.ranking import Ranking
from autotune.request.request import JobRequest
from autotune.session.environments import search_environment
from autotune.strategies.strategy import Strategy
from search_spaces.cluster import ClusterSpec
from search_spaces.model import Model
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig
from storage.records import BUDGET, LABELS, JobRecord, TrialRecord

if TYPE_CHECKING:
    from autotune.session.extrapolation import Extrapolation

OPTIMIZER = "optimizer"
"""The knob of which a job has one value, unless it names several: losses differ from the first update on."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Everything that a job's request names, resolved. The same in every process that opens the same row."""

    request: JobRequest
    """With its resolved fields filled in: what the job's row holds."""
    model: Model
    cluster: ClusterSpec
    space: SearchSpace
    baselines: tuple[TrialConfig, ...]
    """Trial 0, and what is tried in its place, in order, where it does not fit."""
    ranking: Ranking
    prior: Spread
    strategy: Strategy
    extrapolation: "Extrapolation | None" = None
    """To the cluster that the answer is for; None: that of the trials."""

    @property
    def world_size(self) -> int:
        """Ranks of a trial."""
        return self.space.world_size

    @property
    def environment(self) -> str:
        """What the ranks' processes are started with in the whole search."""
        return search_environment(self.space)

    def tries_environment(self, config: TrialConfig) -> bool:
        """Whether a search trial of this configuration belongs to the last stage, which tries environments."""
        return config.environment in self.request.resolved_environments

    def without_environment_stage(self, trials: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
        """The trials of layouts: what a strategy, whose space has one environment, learns from."""
        if not self.request.resolved_environments:
            return trials
        return [trial for trial in trials if not self.tries_environment(trial.config)]

    def device_hours(self, seconds: float) -> float:
        """What `seconds` on every rank of the job cost, in device-hours."""
        return seconds * self.world_size / 3600.0


def with_changes_of(session: Session, job: JobRecord) -> Session:
    """The session with the budget and the labels that the job's row states now."""
    stated = {name: job.request.get(name, getattr(session.request, name)) for name in (*BUDGET, *LABELS)}
    stated["tags"] = tuple(stated["tags"])
    if all(getattr(session.request, name) == value for name, value in stated.items()):
        return session
    return dataclasses.replace(session, request=dataclasses.replace(session.request, **stated))


def on_ray(session: Session, address: str | None) -> Session:
    """The session on the Ray at `address`, where it runs on Ray and names none itself."""
    request = session.request
    if address is None or request.runner != "ray" or request.ray_address is not None:
        return session
    return dataclasses.replace(session, request=dataclasses.replace(request, ray_address=address))
