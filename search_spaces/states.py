"""A lower bound of a rank's memory: parameters, gradients and optimizer state, which every step must hold."""

from search_spaces.model import Model, ModelSpec
from search_spaces.trial_config import TrialConfig

PARAMETER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
MASTER_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
"""Bytes of an element of the master copy, of each of Adam's two moments and of a gradient at rest, by precision."""


def states_lower_bound_bytes(config: TrialConfig, model: Model, world_size: int) -> int:
    """Device bytes that the rank with the most states holds at least at the peak of a step; never above the true peak.

    1. A rank has P = parameters / (tensor x pipeline x expert degree): the fullest rank has at least the mean.
    2. Master, two Adam moments and the gradient at rest take M bytes each per element. At stage 0 they are whole; from
       stage 1 on each rank has 1/S of them, S being the ranks that shard (data x context, or hsdp_shard_size).
    3. Beside them stand the whole parameters at stages 0-2. Where nothing is divided (S = 1) and the precision is the master's
       own, the parameters are the master. At stage 3 nothing is added: they are cast or gathered from it for a while only.
    4. Offloaded shares of the optimizer state do not count. Frozen parameters have neither gradients nor optimizer state.

    Activations, buckets in flight and gathered parameters come on top [Rajbhandari et al. 2020, ZeRO, section 3].
    """
    trainable, frozen = _elements(config, model)
    shards = _shards(config, world_size)
    whole = PARAMETER_BYTES[config.precision]
    master = MASTER_BYTES[config.precision]
    offloaded = 0.0 if config.offload_optimizer == "none" else config.offload_ratio
    states = master * (1.0 - offloaded) / shards
    gradients = master / shards
    if config.zero_stage == 3:
        frozen_bytes = 0.0 if config.offload_param != "none" else frozen * whole / shards
        return int(trainable * (3 * states + gradients) + frozen_bytes)
    optimizer = 2 * states if shards == 1 and whole == master else 3 * states
    return int(trainable * (optimizer + gradients + whole) + frozen * whole)


def _elements(config: TrialConfig, model: Model) -> tuple[float, float]:
    """Trainable and frozen parameters of a rank before sharding."""
    if isinstance(model, ModelSpec):
        parts = config.tensor_parallel_size * config.pipeline_parallel_size * config.expert_parallel_size
        return model.parameter_count / parts, 0.0
    return float(model.parameter_count - model.frozen_parameter_count), float(model.frozen_parameter_count)


def _shards(config: TrialConfig, world_size: int) -> int:
    """Ranks that divide the states among them."""
    if config.zero_stage == 0:
        return 1
    ranks = max(config.data_parallel_size(world_size) * config.context_parallel_size, 1)
    return min(config.hsdp_shard_size, ranks) if config.zero_stage == 3 and config.hsdp_shard_size else ranks
