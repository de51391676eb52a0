"""What the fsdp2 engine honours and refuses. Imports no torch: the search reads it."""

from executor.engines.compiling_rules import COMPILE_SELECTIVE, COMPILE_ZERO_BUBBLE
from search_spaces.capability import Capability, Combination
from search_spaces.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.trial_config import TrialConfig


def _shards_under_zero_bubble(config: TrialConfig, world_size: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return split and config.zero_ranks(world_size) > 1


def _offloads_one(config: TrialConfig, _: int) -> bool:
    return config.offload_optimizer != config.offload_param


def _shards_over_one(config: TrialConfig, world_size: int) -> bool:
    return config.hsdp_shard_size == 1 and config.zero_ranks(world_size) > 1


def _casts_nothing(config: TrialConfig, world_size: int) -> bool:
    return config.precision == "bf16" and config.zero_ranks(world_size) == 1


FSDP2 = Capability(
    engine="fsdp2",
    knobs={
        # 2: parameters stay gathered until their last use in the step. 3: they are released after every use.
        "zero_stage": (2, 3),
        "micro_batch_size": None,
        "reduce_dtype": ("fp32", "bf16"),
        "hsdp_shard_size": None,
        "reshard_after_forward": None,
        "offload_optimizer": ("none", "cpu"),
        "offload_param": ("none", "cpu"),
        "tensor_parallel_size": None,
        "sequence_parallel": None,
        "pipeline_parallel_size": None,
        "virtual_stages": None,
        "pipeline_schedule": None,
        "pipeline_split": None,
        "context_parallel_size": None,
        "activation_checkpointing": None,
        "checkpoint_every_k": None,
        "precision": ("fp32", "bf16", "fp64"),
        "attention_backend": None,
        "loss_chunk_size": None,
        "fused_optimizer": None,
        "rank_order": None,
        "expandable_segments": None,
        "environment": None,
        "compile_blocks": None,
        "context_parallel_method": None,
        "attention_window": None,
        "attention_global_tokens": None,
        "gc_interval": None,
        "numa_binding": None,
        "pack_sequences": None,
    },
    specific=frozenset({"micro_batch_size"}),
    combinations=(
        COMPILE_SELECTIVE,
        COMPILE_ZERO_BUBBLE,
        Combination(
            rule="fsdp2-zero-bubble",
            reads=("pipeline_parallel_size", "pipeline_schedule", "tensor_parallel_size", "context_parallel_size"),
            problem="FSDP2 over more than one data x context rank runs under zero-bubble schedules and computes wrong weights",
            remedy="use gpipe, 1f1b, interleaved_1f1b or looped_bfs, or the native engine",
            holds=_shards_under_zero_bubble,
        ),
        Combination(
            rule="fsdp2-offloads-both",
            reads=("offload_optimizer", "offload_param"),
            problem="CPUOffloadPolicy moves parameters, gradients and optimizer state together, not one without the other",
            remedy="set offload_optimizer and offload_param alike, or use the native engine",
            holds=_offloads_one,
        ),
        Combination(
            rule="fsdp2-copies-alone",
            reads=("hsdp_shard_size", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
            problem="shards of one rank are whole copies, which fully_shard does not make",
            remedy="set hsdp_shard_size to at least 2, or use the ddp or the native engine",
            holds=_shards_over_one,
        ),
        Combination(
            rule="fsdp2-bf16-alone",
            reads=("precision", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
            problem="fully_shard is what casts to bf16, and over one data x context rank there is nothing to shard",
            remedy="use precision=fp32, more data or context ranks, or the native engine",
            holds=_casts_nothing,
        ),
    ),
)
