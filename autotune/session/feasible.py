"""Checks before the first trial that some configuration of a job can run."""

from collections.abc import Sequence

from autotune.errors import DoesNotFitError, NothingFeasibleError, RequestError
from search_spaces.models.model import Model, ModelSpec, Position
from search_spaces.space import SearchSpace
from search_spaces.training.states import states_lower_bound_bytes
from search_spaces.trial_config import TrialConfig


def require_positions(model: Model, sequence_length: int) -> None:
    """Refuse samples that are longer than a table of learned positions. Rotary positions have no limit.

    Raises:
        RequestError: the samples are too long.
    """
    if isinstance(model, ModelSpec) and model.position is Position.LEARNED and sequence_length > model.sequence_length:
        problem = f"{sequence_length} tokens are beyond the {model.sequence_length} learned positions of {model.name}"
        raise RequestError("sequence_length", problem, f"give at most {model.sequence_length}")


def require_fit(space: SearchSpace) -> None:
    """Refuse a model whose states are too large in every configuration.

    Raises:
        DoesNotFitError: on CPU ranks: they exceed the host's memory.
        NothingFeasibleError: they exceed the stated limit or the device.
    """
    least, available = smallest_bound_bytes(space), space.cluster.most_memory_bytes
    host = space.cluster.host_memory_bytes // min(space.cluster.devices_per_node, space.world_size)
    if space.cluster.device.kind == "cpu" and least > host:
        needs = f"the states of {space.model.name} need at least {_gib(least)} on each of {space.world_size} ranks"
        problem = f"{needs}, and the host has {_gib(host)} for each"
        raise DoesNotFitError("model", problem, "choose a smaller model, a larger cluster, or a space with higher ZeRO stages")
    if least > available:
        problem = f"every configuration of {space.model.name} needs at least {least:,} bytes on a rank, over {available:,}"
        raise NothingFeasibleError("memory_limit", problem, "raise the limit, add ranks, or choose a smaller model")


def smallest_bound_bytes(space: SearchSpace) -> int:
    """Return the least bytes that the states of any configuration need on a rank: each knob has its most economical value."""
    economical = ("zero_stage", "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "offload_optimizer")
    config = space.base

    def bound(option: TrialConfig) -> int:
        return states_lower_bound_bytes(option, space.model, space.world_size, space.capability)

    for name in (*economical, "offload_param", "offload_ratio", "precision"):
        values = space.domains.get(name, ())
        options: Sequence[TrialConfig] = [config.replace({name: value}) for value in values] or [config]
        config = min(options, key=bound)
    return bound(config)


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
