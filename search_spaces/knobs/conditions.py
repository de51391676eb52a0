"""Conditions under which knobs have an effect, for use in declarations."""

from typing import Any

from search_spaces.knob import Condition

METHODS = ("lora_rank", "adapter_size", "prefix_length", "prompt_length")
"""Knobs that freeze the model and train additional parameters: low-rank adapters [Hu et al. 2021, LoRA], bottlenecks
[Houlsby et al. 2019], prefixes [Li and Liang 2021] and prompts [Lester et al. 2021]."""
VIRTUAL_TOKENS = ("prefix_length", "prompt_length")
"""The methods that add virtual tokens."""


def _accumulates(config: Any, context: Any) -> bool:
    return int(config.gradient_accumulation_steps(context.workload.global_batch_size, context.world_size)) > 1


def segments_may_grow(config: Any) -> bool:
    """Not with CUDA graphs: torch versions differ in whether segments of their private memory may grow."""
    return not config.cuda_graphs


PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
STAGE_3 = Condition("zero_stage is 3", ("zero_stage",), lambda config, _: config.zero_stage == 3)
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
PIPELINED = Condition(
    "pipeline_parallel_size > 1", ("pipeline_parallel_size",), lambda config, _: config.pipeline_parallel_size > 1
)
CHECKPOINTS = Condition(
    "activation_checkpointing is not none",
    ("activation_checkpointing",),
    lambda config, _: config.activation_checkpointing != "none",
)
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
ACCUMULATES = Condition("gradient_accumulation_steps > 1", ("micro_batch_size", *PARALLEL_SIZES), _accumulates)
ON_CUDA = Condition("on CUDA devices", (), lambda _, context: context.cluster.device.kind == "cuda")
GROWS_SEGMENTS = Condition(
    "on CUDA devices, cuda_graphs is false",
    ("cuda_graphs",),
    lambda config, context: ON_CUDA.holds(config, context) and segments_may_grow(config),
)
