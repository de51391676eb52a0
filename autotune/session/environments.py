"""The environment variables of rank processes: for the whole search, and for its last stage."""

from collections.abc import Sequence

from autotune.errors import RequestError
from autotune.request.checks import ENVIRONMENT_SETTINGS
from autotune.request.request import JobRequest
from search_spaces.environment import (
    ENVIRONMENT,
    STANDARD,
    environment_problem,
    merged,
    standard_settings,
    variables_of,
)
from search_spaces.models.command import CommandModel
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig


def search_environment(space: SearchSpace) -> str:
    """The search's single value of the knob `environment`."""
    return str(space.domains.get(ENVIRONMENT, (space.base.environment,))[0])


def environments_of(request: JobRequest, space: SearchSpace, baselines: Sequence[TrialConfig]) -> tuple[str, ...]:
    """Return the values of the knob `environment` in the last stage: each setting merged into the search's environment.

    Raises:
        RequestError: a setting is for another kind of device, changes nothing, or sets a variable that the command sets itself.
    """
    given = request.environment_settings
    if given == (STANDARD,):
        given = standard_settings(space.cluster.device.kind, space.cluster.nodes)
    base = search_environment(space)
    found: list[str] = []
    for setting in given:
        environment = merged(base, setting)
        problem = _problem(request.command, space, environment, setting)
        if problem is None and environment in (base, *found, *(config.environment for config in baselines)):
            problem = f"{setting} equals a measured environment"
        if problem is not None:
            raise RequestError(ENVIRONMENT_SETTINGS, problem, "give another setting; docs/environment.md lists the variables")
        found.append(environment)
    return tuple(found)


def _problem(command: CommandModel | None, space: SearchSpace, environment: str, setting: str) -> str | None:
    own = command.environment_knobs if command is not None else {}
    twice = sorted(own.keys() & variables_of(setting).keys())
    if twice:
        return f"the command's own knobs (--environment-knob) set {', '.join(twice)}"
    return environment_problem(environment, space.cluster.device.kind)
