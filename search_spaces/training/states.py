"""A lower bound of a rank's memory: parameters, gradients and optimizer state, which every step must hold."""

from search_spaces.capability import Capability
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model, ModelSpec
from search_spaces.models.stage_layout import marks_offloading
from search_spaces.optimizers import moment_bytes
from search_spaces.training.adapters import adapted, adapts
from search_spaces.trial_config import TrialConfig

PARAMETER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "fp8": 2}
"""Bytes of a parameter in forward and backward. In fp8 alone products are computed: what they read is cast from bf16."""
MASTER_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8, "fp8": 4}
"""Bytes of an element of the master copy, of a moment that is not quantised, and of a gradient at rest, by precision."""


def states_lower_bound_bytes(config: TrialConfig, model: Model, world_size: int, capability: Capability | None = None) -> int:
    """Device bytes that the rank with the most states holds at least at the peak of a step; never above the true peak.

    1. A rank has P = parameters / (tensor x pipeline degree), of experts 1 / expert degree of that: the fullest rank has at
       least the mean.
    2. Master and the gradient at rest take M bytes each per element, the optimizer's moments what `moment_bytes` says (2 M
       for AdamW). At stage 0 they are whole; from stage 1 on each rank has 1/S of them, S being the ranks that shard (data x
       context, or hsdp_shard_size where `capability` divides the states by it); of experts S / expert degree, since so many
       hold the same.
    3. Stages 0-2 have whole parameters too. Where nothing is divided (S = 1) and the precision is the master's own, the
       master is these. They count beside the gradients where `capability` says so, else only the larger of the two does: the
       one stands at the update, the other at the end of forward. At stage 3 nothing is added: parameters are cast or gathered
       from the master for a while only.
    4. An offloaded share of the optimizer state takes its gradients along, since they may be moved while they are made. At
       stage 3 a shard of the parameters in the precision stays for it, unless parameters are offloaded. Where a layout
       offloads that of some stages, any rank may hold these.
    5. Frozen parameters have neither gradients nor optimizer state. Beside adapters or virtual tokens every parameter of the
       shape is frozen, in as many bits as the model states (where a knob asks for them, as `frozen_dtype` says), and what is
       trained comes on top.
    6. Of a user's script nothing is certain, since its optimizer is its own affair: 0.

    Activations, buckets in flight and gathered parameters come on top [Rajbhandari et al. 2020, ZeRO, section 3].

    Args:
        capability: the engine's; None: any engine, which gives the lowest bound.
    """
    model = adapted(model, config)
    trainable, frozen = _elements(config, model)
    frozen *= _frozen_bytes(config, model)
    shards = _shards(config, world_size, capability)
    owned = _owned(config, model, shards)
    whole, master = PARAMETER_BYTES[config.precision], MASTER_BYTES[config.precision]
    offloaded = 0.0 if config.offload_optimizer == "none" else config.offload_ratio
    if marks_offloading(config):
        offloaded = 1.0
    state = master * (1.0 - offloaded)
    gradients, moments = state, _moments(config, model) * (1.0 - offloaded)
    if config.zero_stage == 3:
        kept = 0.0 if config.offload_param != "none" else 1.0
        parameters = kept * (state + whole * offloaded)
        return int(owned * (parameters + moments + gradients) + kept * frozen / shards)
    is_master = shards == 1 and whole == master
    if is_master:
        return int(trainable * (whole + moments + gradients) + frozen)
    beside = capability is not None and capability.keeps_copy_beside_gradients
    copy, gradients = trainable * whole, owned * gradients
    return int(owned * (state + moments) + (copy + gradients if beside else max(copy, gradients)) + frozen)


def _elements(config: TrialConfig, model: Model) -> tuple[float, float]:
    """Trainable and frozen parameters of a rank before sharding."""
    if isinstance(model, CommandModel):
        return 0.0, 0.0
    parts = config.tensor_parallel_size * config.pipeline_parallel_size
    if isinstance(model, ModelSpec) and model.adapts:
        parts *= config.expert_parallel_size
        return model.adapter_parameters / parts, model.parameter_count / parts
    if isinstance(model, ModelSpec):
        elsewhere = model.expert_parameters * (1 - 1 / config.expert_parallel_size)
        return (model.parameter_count - elsewhere) / parts, 0.0
    frozen = model.frozen_parameter_count
    return (model.parameter_count - frozen) / parts, frozen / parts


def _moments(config: TrialConfig, model: Model) -> float:
    """Bytes of moments of a trainable parameter, on the mean."""
    matrix, other = moment_bytes(config.optimizer, MASTER_BYTES[config.precision])
    if not isinstance(model, ModelSpec) or model.adapts:
        return min(matrix, other)
    outputs = 0 if model.tied_embeddings else model.vocab_size * (model.embedding_size or model.hidden_size)
    tables = (model.input_embedding_parameters + outputs) / model.parameter_count
    return matrix * (1 - tables) + other * tables


def _owned(config: TrialConfig, model: Model, shards: int) -> float:
    """Trainable parameters whose states a rank has, where `shards` ranks divide them."""
    trainable, _ = _elements(config, model)
    if shards == 1 or not isinstance(model, ModelSpec) or model.adapts:
        return trainable / shards
    ranks = config.expert_parallel_size
    experts = model.expert_parameters / (config.tensor_parallel_size * config.pipeline_parallel_size * ranks)
    return (trainable - experts) / shards + experts / max(shards / ranks, 1.0)


def _frozen_bytes(config: TrialConfig, model: Model) -> float:
    """Bytes of a frozen parameter: the precision's, or fewer where its base weights are kept so."""
    whole = PARAMETER_BYTES[config.precision]
    in_precision = adapts(config) and config.frozen_dtype == "same"
    if not isinstance(model, ModelSpec) or not model.adapts or in_precision:
        return whole
    return min(whole, model.frozen_bytes)


def _shards(config: TrialConfig, world_size: int, capability: Capability | None) -> int:
    """Ranks that divide the states among them."""
    if config.zero_stage == 0:
        return 1
    ranks = max(config.zero_ranks(world_size), 1)
    if capability is None or capability.divides_states_over_all_ranks:
        return ranks
    return min(config.hsdp_shard_size, ranks) if config.zero_stage == 3 and config.hsdp_shard_size else ranks
