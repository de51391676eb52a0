"""A rank's states: a lower bound of its memory, and bytes in files and in the host buffers for them."""

from search_spaces.capability import Capability
from search_spaces.models.command import CommandModel
from search_spaces.models.model import Model, ModelSpec
from search_spaces.models.pipeline import marks_offloading
from search_spaces.optimizers import master_bytes, moment_bytes
from search_spaces.training.adapters import adapts, configured
from search_spaces.trial_config import TrialConfig

PARAMETER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "fp8": 2}
"""Bytes of a parameter in forward and backward. fp8 applies only to matrix products, whose inputs are cast from bf16."""
MASTER_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8, "fp8": 4}
"""Precision -> bytes per element of the master copy, of an unquantised moment, and of a stored gradient."""


def states_lower_bound_bytes(config: TrialConfig, model: Model, world_size: int, capability: Capability | None = None) -> int:
    """Lower bound of the peak device bytes on the rank with the most states; never above the true peak.

    1. A rank has P = parameters / (tensor x pipeline degree), of experts parameters / (expert x expert tensor x pipeline
       degree): the fullest rank has at least the mean.
    2. Master copy and stored gradient take M bytes each per element (the copy of adamw_bf16 `master_bytes`), the optimizer's
       moments take `moment_bytes` (2 M for AdamW). At stage 0 they are whole; from stage 1 on each rank has 1/S of them, where
       S is the number of sharding ranks (data x context, or hsdp_shard_size if `capability` shards by it); for experts S x
       tensor / (expert x expert tensor degree), since that many ranks hold the same experts.
    3. Stages 0-2 hold whole parameters too. Without sharding and with the master's precision, the master copy is the
       parameters. They count in addition to the gradients if `capability` says so, else only the larger of the two counts:
       one exists at the update, the other at the end of forward. At stage 3 nothing is added: parameters are cast or gathered
       from the master only temporarily.
    4. An offloaded share of the optimizer state offloads its gradients too, since they may be moved as they are computed. At
       stage 3 a shard of the parameters in the precision stays on the device, unless parameters are offloaded. If a layout
       offloads only some stages, any rank may hold these stages.
    5. Frozen parameters have neither gradients nor optimizer state. With adapters or virtual tokens every parameter of the
       shape is frozen, with the number of bits of the model (or of `frozen_dtype`, if knobs add the adapters); the trained
       parameters are added.
    6. For a user's script the bound is 0, since its optimizer is unknown.

    Activations, buckets in flight and gathered parameters are not included [Rajbhandari et al. 2020, ZeRO, section 3].

    Args:
        capability: of the engine; None: any engine, which gives the lowest bound.
    """
    model = configured(model, config)
    trainable, frozen = _elements(config, model)
    frozen *= _frozen_bytes(config, model)
    shards = _shards(config, world_size, capability)
    owned = _owned(config, model, shards)
    whole, gradient = PARAMETER_BYTES[config.precision], MASTER_BYTES[config.precision]
    master = master_bytes(config.optimizer, gradient)
    offloaded = 0.0 if config.offload_optimizer == "none" else config.offload_ratio
    if marks_offloading(config):
        offloaded = 1.0
    state = master * (1.0 - offloaded)
    gradients, moments = gradient * (1.0 - offloaded), _moments(config, model) * (1.0 - offloaded)
    if config.zero_stage == 3:
        device_share = 0.0 if config.offload_param != "none" else 1.0
        parameters = device_share * (state + whole * offloaded)
        return int(owned * (parameters + moments + gradients) + device_share * frozen / shards)
    is_master = owned == trainable and whole == master
    if is_master:
        return int(trainable * (whole + moments + gradients) + frozen)
    adds_copy = capability is not None and capability.keeps_copy_beside_gradients
    copy, gradients = trainable * whole, owned * gradients
    return int(owned * (state + moments) + (copy + gradients if adds_copy else max(copy, gradients)) + frozen)


def _elements(config: TrialConfig, model: Model) -> tuple[float, float]:
    """Trainable and frozen parameters of a rank before sharding."""
    if isinstance(model, CommandModel):
        return 0.0, 0.0
    parts = config.tensor_parallel_size * config.pipeline_parallel_size
    if isinstance(model, ModelSpec) and model.adapts:
        # A lower bound: adapters are refused where experts are placed apart.
        parts *= config.expert_parallel_size
        return model.adapter_parameters / parts, model.parameter_count / parts
    if isinstance(model, ModelSpec):
        return (model.parameter_count - model.expert_parameters) / parts + _own_experts(config, model), 0.0
    frozen = model.frozen_parameter_count
    return (model.parameter_count - frozen) / parts, frozen / parts


def _moments(config: TrialConfig, model: Model) -> float:
    """Mean bytes of moments per trainable parameter."""
    matrix, other = moment_bytes(config.optimizer, MASTER_BYTES[config.precision])
    if not isinstance(model, ModelSpec) or model.adapts:
        return min(matrix, other)
    outputs = 0 if model.tied_embeddings else model.vocab_size * (model.embedding_size or model.hidden_size)
    tables = (model.input_embedding_parameters + outputs) / model.parameter_count
    return matrix * (1 - tables) + other * tables


def _owned(config: TrialConfig, model: Model, shards: int) -> float:
    """Trainable parameters whose states a rank has, if `shards` ranks shard them."""
    trainable, _ = _elements(config, model)
    if config.zero_stage == 0 or not isinstance(model, ModelSpec) or model.adapts:
        return trainable / shards
    alike = shards * config.tensor_parallel_size / (config.expert_parallel_size * config.expert_slices)
    if shards == 1 and alike <= 1:
        return trainable
    experts = _own_experts(config, model)
    return (trainable - experts) / shards + experts / max(alike, 1.0)


def _own_experts(config: TrialConfig, model: ModelSpec) -> float:
    """Parameters of experts on a rank before sharding."""
    return model.expert_parameters / (config.expert_parallel_size * config.expert_slices * config.pipeline_parallel_size)


def _frozen_bytes(config: TrialConfig, model: Model) -> float:
    """Bytes of a frozen parameter: those of the precision, or fewer if the base weights are quantised."""
    whole = PARAMETER_BYTES[config.precision]
    in_precision = adapts(config) and config.frozen_dtype == "same"
    if not isinstance(model, ModelSpec) or not model.adapts or in_precision:
        return whole
    return min(whole, model.frozen_bytes)


def _shards(config: TrialConfig, world_size: int, capability: Capability | None) -> int:
    """Number of ranks that shard the states."""
    if config.zero_stage == 0:
        return 1
    ranks = max(config.zero_ranks(world_size), 1)
    if capability is None or capability.divides_states_over_all_ranks:
        return ranks
    return min(config.hsdp_shard_size, ranks) if config.zero_stage == 3 and config.hsdp_shard_size else ranks


CHUNK_ELEMENTS = 1 << 22
"""Elements of the optimizer state that are transferred and updated together: 16 MiB of fp32 gradient, 48 MiB of state."""
REQUEST_BYTES = 4 << 20
"""Bytes of one request to a file: large enough for a device's full rate; a transfer is several of them at once."""
REQUEST_THREADS = 4
"""Concurrent requests of a rank, reads and writes together."""
BUFFERS = 4
"""Chunks in host memory at the same time, two per direction: one is read while one is updated, and two are being written."""
UNITS = 3
"""Parameter units in host memory at the same time: two that are prefetched, and one that is read on demand."""
STATES = 3
"""Values per element in a file: master and two moments."""


def file_bytes(config: TrialConfig, model: Model, world_size: int) -> int:
    """Bytes in the files of all ranks together, without rounding to blocks.

    A rank has 3 M r P / S of optimizer state: P trainable parameters of its slice and stages, S ranks that shard them, the
    share r that is offloaded, M bytes per value; and W P / S of parameters, W bytes each. Unknown for a script: 0.
    """
    shards = _shards(config, world_size, None)
    trainable, frozen = _owned(config, model, shards), _elements(config, model)[1] / shards
    rank_bytes = 0.0
    if config.offload_optimizer == "nvme":
        rank_bytes += trainable * STATES * MASTER_BYTES[config.precision] * config.offload_ratio
    if config.offload_param == "nvme":
        rank_bytes += (trainable + frozen) * PARAMETER_BYTES[config.precision]
    return int(config.data_parallel_size(world_size) * config.model_parallel_size * rank_bytes)


def scales_losses(config: TrialConfig) -> bool:
    """Whether gradients are computed, accumulated or communicated in fp16."""
    return "fp16" in (config.precision, config.reduce_dtype, config.accumulation_dtype)
