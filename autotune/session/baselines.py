"""Trial 0: the user's current configuration, else the defaults at the lowest ZeRO stage that fits."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import RequestError
from search_spaces.file_kinds import DEEPSPEED, kind_of
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, check_value
from search_spaces.space import SearchSpace
from search_spaces.spaces import settled
from search_spaces.training.states import states_lower_bound_bytes
from search_spaces.trial_config import TrialConfig

if TYPE_CHECKING:
    from autotune.session.extrapolation import Extrapolation


def read_baseline(path: Path) -> dict[str, Value]:
    """Read knob values from a user's file: a JSON object {knob: value}, or the best of a best-config.json.

    Raises:
        RequestError: the file cannot be read, or names an unknown knob.
    """
    give = "give a JSON object {knob: value}, or a best-config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError("baseline", f"{path} cannot be read as JSON ({error})", give) from error
    if isinstance(content, Mapping) and isinstance(content.get("best"), Mapping):
        content = content["best"].get("config")
    if not isinstance(content, Mapping):
        raise RequestError("baseline", f"{path} is not a JSON object", give)
    if not set(content) & set(KNOBS) and (kind := kind_of(content)):
        remedy = "start from it with --from" if kind == DEEPSPEED else give
        raise RequestError("baseline", f"{path} is {kind}, not values of knobs", remedy)
    return {str(name): check_value(str(name), value) for name, value in content.items()}


def baselines_of(
    values: Mapping[str, Any] | None, space: SearchSpace, extrapolation: "Extrapolation | None"
) -> tuple[TrialConfig, ...]:
    """Return the user's configuration, then the defaults at each ZeRO stage of the space, from the lowest whose states fit.

    Raises:
        RequestError: the user's configuration is illegal here or on the cluster that the answer is for.
    """
    users, defaults = _users_baseline(values, space), _default_baselines(space)
    if extrapolation is not None:
        for refused in filter(None, map(extrapolation.refusal, users)):
            raise RequestError("baseline", f"is refused by {refused.rule}: {refused.message}", refused.remedy)
        defaults = [config for config in defaults if extrapolation.refusal(config) is None]
    chain = [*users, *defaults]
    return tuple({config.hash: config for config in chain}.values())


def _users_baseline(values: Mapping[str, Any] | None, space: SearchSpace) -> list[TrialConfig]:
    if values is None:
        return []
    # If the user's configuration does not mention compiled blocks, it has none, whatever the device's default is.
    config = space.canonical(space.base.replace({"compile_blocks": False, **values}))
    if refusals := space.check(config):
        raise RequestError("baseline", f"is refused by {refusals[0].rule}: {refusals[0].message}", refusals[0].remedy)
    return [config]


def _default_baselines(space: SearchSpace) -> list[TrialConfig]:
    stages = sorted(int(stage) for stage in space.domains.get("zero_stage", (space.base.zero_stage,)))
    explicit_knobs = () if False in space.domains.get("compile_blocks", ()) else ("compile_blocks",)
    admitted = [space.admitted(space.base.replace({"zero_stage": stage})) for stage in stages]
    configs = [settled(config, space.context, explicit_knobs) for config in admitted]
    legal = [config for config in configs if not space.check(config)]
    available = space.cluster.most_memory_bytes
    fitting = [c for c in legal if states_lower_bound_bytes(c, space.model, space.world_size, space.capability) <= available]
    return fitting or legal[-1:]
