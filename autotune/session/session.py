"""A job's session: everything that its request names, resolved and checked, and the environments of its rank processes."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.errors import RequestError
from autotune.objective.intervals import Spread
from autotune.objective.ranking import Ranking
from autotune.request.checks import ENVIRONMENT_SETTINGS
from autotune.request.request import JobRequest
from autotune.strategies.strategy import Strategy
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.environment import ENVIRONMENT, STANDARD, environment_problem, merged, standard_settings, variables_of
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig
from storage.records import BUDGET, LABELS, JobRecord, TrialRecord

if TYPE_CHECKING:
    from autotune.session.extrapolation import Extrapolation

OPTIMIZER = "optimizer"
"""This knob has one value per job unless the request names several, because losses differ from the first update on."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Everything that a job's request names, resolved. It is the same in every process that opens the same row."""

    request: JobRequest
    """The request with its resolved fields filled in, as stored in the job's row."""
    model: Model
    cluster: ClusterSpec
    space: SearchSpace
    baselines: tuple[TrialConfig, ...]
    """Trial 0 and, in order, its replacements if it does not fit."""
    ranking: Ranking
    prior: Spread
    strategy: Strategy
    extrapolation: "Extrapolation | None" = None
    """Extrapolation to the cluster that the answer is for; None: the cluster of the trials."""

    @property
    def world_size(self) -> int:
        """Ranks of a trial."""
        return self.space.world_size

    @property
    def environment(self) -> str:
        """The environment of rank processes during the search."""
        return search_environment(self.space)

    def tries_environment(self, config: TrialConfig) -> bool:
        """Whether a search trial of this configuration belongs to the last stage, which tries environments."""
        return config.environment in self.request.resolved_environments

    def without_environment_stage(self, trials: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
        """The trials without those of the last stage: the history of a strategy, whose space has only one environment."""
        if not self.request.resolved_environments:
            return trials
        return [trial for trial in trials if not self.tries_environment(trial.config)]

    def device_hours(self, seconds: float) -> float:
        """Device-hours of `seconds` on every rank of the job."""
        return seconds * self.world_size / 3600.0


def with_changes_of(session: Session, job: JobRecord) -> Session:
    """Return the session with the budget and the labels that the job's row has now."""
    changes = {name: job.request.get(name, getattr(session.request, name)) for name in (*BUDGET, *LABELS)}
    changes["tags"] = tuple(changes["tags"])
    if all(getattr(session.request, name) == value for name, value in changes.items()):
        return session
    return dataclasses.replace(session, request=dataclasses.replace(session.request, **changes))


def on_ray(session: Session, address: str | None) -> Session:
    """Return the session with this Ray address, if it runs on Ray and has no address itself."""
    request = session.request
    if address is None or request.runner != "ray" or request.ray_address is not None:
        return session
    return dataclasses.replace(session, request=dataclasses.replace(request, ray_address=address))


def search_environment(space: SearchSpace) -> str:
    """The search's single value of the knob `environment`."""
    return str(space.domains.get(ENVIRONMENT, (space.base.environment,))[0])


def environments_of(request: JobRequest, space: SearchSpace, baselines: Sequence[TrialConfig]) -> tuple[str, ...]:
    """Return the values of the knob `environment` in the last stage: each setting merged into the search's environment.

    Raises:
        RequestError: a setting is for another kind of device, changes nothing, or sets a variable that the command sets itself.
    """
    settings = request.environment_settings
    if settings == (STANDARD,):
        settings = standard_settings(space.cluster.device.kind, space.cluster.nodes)
    base = search_environment(space)
    environments: list[str] = []
    for setting in settings:
        environment = merged(base, setting)
        problem = _problem(request.command, space, environment, setting)
        if problem is None and environment in (base, *environments, *(config.environment for config in baselines)):
            problem = f"{setting} equals a measured environment"
        if problem is not None:
            raise RequestError(ENVIRONMENT_SETTINGS, problem, "give another setting; docs/performance.md lists the variables")
        environments.append(environment)
    return tuple(environments)


def _problem(command: CommandModel | None, space: SearchSpace, environment: str, setting: str) -> str | None:
    command_knobs = command.environment_knobs if command is not None else {}
    twice = sorted(command_knobs.keys() & variables_of(setting).keys())
    if twice:
        return f"the command's own knobs (--environment-knob) set {', '.join(twice)}"
    return environment_problem(environment, space.cluster.device.kind)
