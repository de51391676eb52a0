"""Equal behaviour, one configuration: what does not matter stands at its default, what is too large is clipped."""

from collections.abc import Iterable

from search_spaces.compression import INT8
from search_spaces.context import SpaceContext
from search_spaces.environment import ENVIRONMENT
from search_spaces.fused_kernels import FUSED_KERNELS, LOSS, replaced
from search_spaces.knobs import KNOBS, PARALLEL_SIZES
from search_spaces.model import FactoryModel, ModelSpec
from search_spaces.pipeline import split_layers
from search_spaces.stage_layout import Stage, layout_text, parse_layout
from search_spaces.trial_config import TrialConfig, Value
from search_spaces.windows import tokens_seen

SEARCH_ORDER: tuple[str, ...] = (
    *PARALLEL_SIZES,
    "micro_batch_size",
    "compile_blocks",
    FUSED_KERNELS,
    "cuda_graphs",
    "pipeline_schedule",
    "virtual_stages",
    "pipeline_layout",
    "pipeline_split",
    "sequence_parallel",
    "async_tensor_parallel",
    "context_parallel_method",
    "expert_parallel_size",
    "rank_order",
    "zero_stage",
    "reshard_after_forward",
    "defer_gradient_reduction",
    "accumulation_dtype",
    "optimizer",
    "onebit_warmup_steps",
    "hsdp_shard_size",
    "secondary_shard_size",
    "gather_dtype",
    "offload_optimizer",
    "offload_ratio",
    "offload_param",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "allgather_bucket_size",
    "activation_checkpointing",
    "checkpoint_every_k",
    "offload_activations",
    "reduce_bucket_size",
    "overlap_comm",
    "overlap_param_gather",
    "contiguous_gradients",
    "reduce_dtype",
    "precision",
    "attention_backend",
    "attention_window",
    "attention_global_tokens",
    "lora_rank",
    "adapter_size",
    "prefix_length",
    "prompt_length",
    "lora_targets",
    "frozen_dtype",
    "curriculum_start_length",
    "curriculum_steps",
    "random_ltd_start_tokens",
    "random_ltd_steps",
    "pack_sequences",
    "loss_chunk_size",
    "fused_optimizer",
    "expandable_segments",
    "gc_interval",
    "numa_binding",
    "script",
    ENVIRONMENT,
)
"""Every knob, those that a condition reads before the knob that it stands for, and knobs that share a rule close together:
counting remembers one number per combination of the knobs that are still to be read, so that short distances keep it fast.
A knob that is tied to several that have nothing else to do with each other comes before them: where it does not vary, they
stay apart."""
OWN_READS: dict[str, tuple[str, ...]] = {
    "hsdp_shard_size": PARALLEL_SIZES,
    "secondary_shard_size": (*PARALLEL_SIZES, "hsdp_shard_size"),
    "gather_dtype": (*PARALLEL_SIZES, "hsdp_shard_size"),
    "reduce_dtype": PARALLEL_SIZES,
    "pipeline_split": ("pipeline_parallel_size", "virtual_stages"),
    "pipeline_layout": ("pipeline_parallel_size", "virtual_stages"),
    FUSED_KERNELS: ("tensor_parallel_size",),
    "loss_chunk_size": ("tensor_parallel_size", FUSED_KERNELS),
}
"""Knob -> what its canonical value depends on beside what its condition reads."""


def canonical_reads(name: str) -> tuple[str, ...]:
    """The other knobs that the canonical value of a knob depends on."""
    condition = KNOBS[name].condition
    return (*(condition.reads if condition else ()), *OWN_READS.get(name, ()))


def canonical_value(name: str, value: Value, config: TrialConfig, context: SpaceContext) -> Value:
    """The value that stands for `value`, given that the knobs of `canonical_reads` are canonical in `config`.

    1. Where the knob's condition does not hold: the default.
    2. Element sizes from the model's parameter count on: the default where that is one of them, else the count. (The default
       and not always the count, because an engine that does not honour the knob still honours its default.) A count that is
       not known, of a user's script, clips nothing.
    3. A shard group of all ranks of data x context: 0, which means the same.
    4. The flash kernel on CPUs: what torch chooses there.
    5. A split of the layers that gives every stage what the default gives it: the default. A layout without marks that gives
       every stage what the default split does: none.
    6. A window of the whole sequence, or as long as the model's own: the default.
    7. Integers over one rank, to which nothing is sent: the default. A second copy of the parameters over all ranks that shard
       them: none.
    8. Fused kernels that take the place of nothing in the model: none. Tokens whose logits are held at once, where a kernel of
       the loss decides that: the default.
    """
    knob = KNOBS[name]
    if knob.condition is not None and not knob.condition.holds(config, context):
        value = knob.default
    if knob.is_element_size and int(value) >= (count := context.model.parameter_count) > 0:
        return max(int(knob.default), count)
    if name == "hsdp_shard_size" and value == config.zero_ranks(context.world_size):
        return 0
    if name == "secondary_shard_size" and value == config.shard_ranks(context.world_size):
        return 0
    if name == "gather_dtype" and config.shard_ranks(context.world_size) == 1:
        return knob.default
    if name == "reduce_dtype" and value == INT8 and config.zero_ranks(context.world_size) == 1:
        return knob.default
    if name == "attention_backend" and value == "flash" and context.cluster.device.kind == "cpu":
        return knob.default
    if name == "attention_window" and value and int(value) >= tokens_seen(context.model, context.workload.sequence_length) > 0:
        return knob.default
    if name == FUSED_KERNELS and isinstance(context.model, ModelSpec) and not _replaced(str(value), config, context.model):
        return knob.default
    if name == "loss_chunk_size" and isinstance(context.model, ModelSpec):
        return knob.default if LOSS in _replaced(config.fused_kernels, config, context.model) else value
    if name == "pipeline_split" and value != knob.default and _splits_alike(config, context, value):
        return knob.default
    if name == "pipeline_layout" and value and is_split(str(value), knobs_split(config), context):
        return knob.default
    return value


def _replaced(kernels: str, config: TrialConfig, model: ModelSpec) -> frozenset[str]:
    return replaced(kernels, model, config.tensor_parallel_size)


def knobs_split(config: TrialConfig) -> TrialConfig:
    """The configuration as the default split lays it out."""
    return config.replace({"pipeline_split": KNOBS["pipeline_split"].default, "pipeline_layout": ""})


def is_split(layout: str, config: TrialConfig, context: SpaceContext) -> bool:
    """Whether a layout without marks gives every stage the layers that the `pipeline_split` of a configuration does."""
    if not isinstance(context.model, ModelSpec):
        return False
    stages = parse_layout(layout)
    if len(stages) != config.pipeline_parallel_size * config.virtual_stages or len(stages) > context.model.num_layers:
        return False
    split = split_layers(context.model, config, context.workload.sequence_length)
    return layout == layout_text(Stage(layers=len(layers)) for layers in split)


def _splits_alike(config: TrialConfig, context: SpaceContext, split: Value) -> bool:
    """Whether `split` gives every stage the layers that the default split does."""
    if not isinstance(context.model, ModelSpec):
        # Of a module's blocks nothing is known that would make one dearer than another; a script's split is its own affair.
        return isinstance(context.model, FactoryModel)
    if config.pipeline_parallel_size * config.virtual_stages >= context.model.num_layers:
        return True  # a layer each, where there are enough: found without a list of however many stages were asked for
    default = config.replace({"pipeline_split": KNOBS["pipeline_split"].default})
    other, length = config.replace({"pipeline_split": split}), context.workload.sequence_length
    return split_layers(context.model, other, length) == split_layers(context.model, default, length)


def canonical_values(name: str, domain: Iterable[Value], config: TrialConfig, context: SpaceContext) -> tuple[Value, ...]:
    """What the values of a domain stand for, each once, in the order of the domain."""
    return tuple(dict.fromkeys(canonical_value(name, value, config, context) for value in domain))


def canonical(config: TrialConfig, context: SpaceContext) -> TrialConfig:
    """The one configuration that stands for all that behave as `config` does. Idempotent."""
    for name in SEARCH_ORDER:
        value = getattr(config, name)
        stands_for = canonical_value(name, value, config, context)
        if stands_for != value:
            config = config.replace({name: stands_for})
    return config
