"""What the native engine honours. Imports no torch: the search reads it."""

from search_spaces.capability import Capability

NATIVE = Capability(
    engine="native",
    knobs={
        "zero_stage": None,
        "micro_batch_size": None,
        "reduce_bucket_size": None,
        "allgather_bucket_size": None,
        "prefetch_bucket_size": None,
        "param_persistence_threshold": None,
        "max_live_parameters": None,
        "overlap_comm": None,
        "contiguous_gradients": None,
        "defer_gradient_reduction": None,
        "reduce_dtype": ("fp32", "bf16"),
        "reshard_after_forward": None,
        "activation_checkpointing": ("none", "full"),
        "precision": ("fp64", "fp32", "bf16"),
        "loss_chunk_size": None,
        "fused_optimizer": None,
        "expandable_segments": None,
    },
)
