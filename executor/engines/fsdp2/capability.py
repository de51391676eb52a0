"""What the fsdp2 engine honours and refuses. Does not import torch, since the search reads it."""

from executor.engines.shared_rules import COMPILE_SELECTIVE, COMPILE_ZERO_BUBBLE, splits_backward
from search_spaces.capability import Capability, Combination, honoured_by

FSDP2 = Capability(
    engine="fsdp2",
    knobs=honoured_by(
        "fsdp2",
        {
            # 2: parameters stay gathered until their last use in the step. 3: they are released after every use.
            "zero_stage": (2, 3),
            "reduce_dtype": ("fp32", "bf16"),
            "offload_optimizer": ("none", "cpu"),
            "offload_param": ("none", "cpu"),
            "precision": ("fp32", "bf16", "fp64"),
        },
    ),
    specific=frozenset({"micro_batch_size"}),
    combinations=(
        COMPILE_SELECTIVE,
        COMPILE_ZERO_BUBBLE,
        Combination(
            rule="fsdp2-zero-bubble",
            reads=("pipeline_parallel_size", "pipeline_schedule", "tensor_parallel_size", "context_parallel_size"),
            problem="FSDP2 over more than one data x context rank runs under zero-bubble schedules and computes wrong weights",
            remedy="use gpipe, 1f1b, interleaved_1f1b or looped_bfs, or the native engine",
            holds=lambda config, world_size: splits_backward(config) and config.zero_ranks(world_size) > 1,
        ),
        Combination(
            rule="fsdp2-offloads-both",
            reads=("offload_optimizer", "offload_param"),
            problem="CPUOffloadPolicy moves parameters, gradients and optimizer state together, not one without the other",
            remedy="set offload_optimizer and offload_param to the same value, or use the native engine",
            holds=lambda config, _: config.offload_optimizer != config.offload_param,
        ),
        Combination(
            rule="fsdp2-copies-alone",
            reads=("hsdp_shard_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
            problem="shards over one rank are whole copies, which fully_shard does not support",
            remedy="set hsdp_shard_size to at least 2, or use the ddp or the native engine",
            holds=lambda config, world_size: config.hsdp_shard_size == 1 and config.zero_ranks(world_size) > 1,
        ),
        Combination(
            rule="fsdp2-bf16-alone",
            reads=("precision", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
            problem="only fully_shard casts to bf16, and with one data x context rank there is nothing to shard",
            remedy="use precision=fp32, more data or context ranks, or the native engine",
            holds=lambda config, world_size: config.precision == "bf16" and config.zero_ranks(world_size) == 1,
        ),
    ),
)
