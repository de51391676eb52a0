"""Conditions under which knobs have an effect, for use in declarations."""

from typing import Any

from search_spaces.knob import Condition
from search_spaces.models.pipeline import marks_offloading, marks_recomputation
from search_spaces.optimizers import KERNELS

METHODS = ("lora_rank", "adapter_size", "prefix_length", "prompt_length")
"""Knobs that freeze the model and train additional parameters: low-rank adapters [Hu et al. 2021, LoRA], bottlenecks
[Houlsby et al. 2019], prefixes [Li and Liang 2021] and prompts [Lester et al. 2021]."""
VIRTUAL_TOKENS = ("prefix_length", "prompt_length")
"""The methods that add virtual tokens."""


def _at_stages(*stages: int) -> Condition:
    text = f"zero_stage is {' or '.join(str(stage) for stage in stages)}"
    return Condition(text, ("zero_stage",), lambda config, _: config.zero_stage in stages)


def _accumulates(config: Any, context: Any) -> bool:
    return int(config.gradient_accumulation_steps(context.workload.global_batch_size, context.world_size)) > 1


def segments_may_grow(config: Any) -> bool:
    """Not with CUDA graphs: torch versions differ in whether segments of their private memory may grow."""
    return not config.cuda_graphs


PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
STAGE_3 = _at_stages(3)
STAGES_1_2 = _at_stages(1, 2)
GATHERS_UPDATED = Condition(
    "zero_stage is 1 or 2 and data x context ranks > 1",
    ("zero_stage", *PARALLEL_SIZES),
    lambda config, context: config.zero_stage in (1, 2) and config.zero_ranks(context.world_size) > 1,
)
DEFERS = Condition(
    "zero_stage is 2 and gradient_accumulation_steps > 1",
    ("zero_stage", "micro_batch_size", *PARALLEL_SIZES),
    lambda config, context: config.zero_stage == 2 and _accumulates(config, context),
)
OFFLOADS = Condition(
    "offload_optimizer is not none", ("offload_optimizer",), lambda config, _: config.offload_optimizer != "none"
)
TENSOR_PARALLEL = Condition(
    "tensor_parallel_size > 1", ("tensor_parallel_size",), lambda config, _: config.tensor_parallel_size > 1
)
TENSOR_PARALLEL_EXPERTS = Condition(
    "tensor_parallel_size > 1 and the model has experts",
    ("tensor_parallel_size",),
    lambda config, context: config.tensor_parallel_size > 1 and getattr(context.model, "num_experts", 0) > 0,
)
SHARED_EXPERTS_APART = Condition(
    "expert_parallel_size > 1 and the model has shared experts",
    ("expert_parallel_size",),
    lambda config, context: config.expert_parallel_size > 1 and getattr(context.model, "shared_expert_size", 0) > 0,
)
PIPELINED = Condition(
    "pipeline_parallel_size > 1", ("pipeline_parallel_size",), lambda config, _: config.pipeline_parallel_size > 1
)
SPLITS = Condition(
    "pipeline_parallel_size > 1 and pipeline_layout is empty",
    ("pipeline_parallel_size", "pipeline_layout"),
    lambda config, _: config.pipeline_parallel_size > 1 and not config.pipeline_layout,
)
UNIFORM_RECOMPUTATION = Condition(
    "pipeline_layout marks no recomputation", ("pipeline_layout",), lambda config, _: not marks_recomputation(config)
)
UNIFORM_OFFLOADING = Condition(
    "pipeline_layout marks no offloading", ("pipeline_layout",), lambda config, _: not marks_offloading(config)
)
CHECKPOINTS = Condition(
    "activation_checkpointing is not none",
    ("activation_checkpointing",),
    lambda config, _: config.activation_checkpointing != "none",
)
LOW_RANK = Condition("lora_rank > 0", ("lora_rank",), lambda config, _: config.lora_rank > 0)
ADAPTED = Condition(
    f"{', '.join(METHODS[:-1])} or {METHODS[-1]} > 0",
    METHODS,
    lambda config, _: any(getattr(config, name) > 0 for name in METHODS),
)
BIASED_ROUTERS = Condition(
    f"the model has a bias of the choice of experts, and {', '.join(METHODS)} are 0",
    METHODS,
    lambda config, context: (
        getattr(context.model, "router_correction", False) and not any(getattr(config, name) > 0 for name in METHODS)
    ),
)
CONTEXT_PARALLEL = Condition(
    "context_parallel_size > 1", ("context_parallel_size",), lambda config, _: config.context_parallel_size > 1
)
WINDOWED = Condition("attention_window > 0", ("attention_window",), lambda config, _: config.attention_window > 0)
PREDICTS_TOKENS = Condition("mtp_layers > 0", ("mtp_layers",), lambda config, _: config.mtp_layers > 0)
LENGTHENS = Condition(
    "curriculum_start_length > 0", ("curriculum_start_length",), lambda config, _: config.curriculum_start_length > 0
)
DROPS_TOKENS = Condition(
    "random_ltd_start_tokens > 0", ("random_ltd_start_tokens",), lambda config, _: config.random_ltd_start_tokens > 0
)
DATA_AND_PIPELINE = Condition(
    "pipeline_parallel_size > 1 and data-parallel degree > 1",
    PARALLEL_SIZES,
    lambda config, context: config.pipeline_parallel_size > 1 and config.data_parallel_size(context.world_size) > 1,
)
ACCUMULATES = Condition("gradient_accumulation_steps > 1", ("micro_batch_size", *PARALLEL_SIZES), _accumulates)
HAS_KERNEL = Condition(f"optimizer is {' or '.join(KERNELS)}", ("optimizer",), lambda config, _: config.optimizer in KERNELS)
ONEBIT = Condition("optimizer is onebit_adam", ("optimizer",), lambda config, _: config.optimizer == "onebit_adam")
GATHERS_AGAIN = Condition(
    "zero_stage is 3 and reshard_after_forward",
    ("zero_stage", "reshard_after_forward"),
    lambda config, _: config.zero_stage == 3 and config.reshard_after_forward,
)
ON_CUDA = Condition("on CUDA devices", (), lambda _, context: context.cluster.device.kind == "cuda")
GROWS_SEGMENTS = Condition(
    "on CUDA devices, cuda_graphs is false",
    ("cuda_graphs",),
    lambda config, context: ON_CUDA.holds(config, context) and segments_may_grow(config),
)

PACKS = Condition("two of the workload's documents fit into a row", (), lambda _, context: context.workload.packs)
HAS_NUMA_NODES = Condition("a machine has several NUMA nodes", (), lambda _, context: context.cluster.numa_nodes != 1)
