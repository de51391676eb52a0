"""What the ddp engine honours. Imports no torch: the search reads it."""

from executor.engines.compiling_rules import COMPILE_SELECTIVE
from search_spaces.capability import Capability

DDP = Capability(
    engine="ddp",
    knobs={
        "micro_batch_size": None,
        "reduce_bucket_size": None,
        "activation_checkpointing": None,
        "checkpoint_every_k": None,
        "precision": ("fp32", "bf16", "fp64"),
        "attention_backend": None,
        "loss_chunk_size": None,
        "fused_optimizer": None,
        "expandable_segments": None,
        "environment": None,
        "compile_blocks": None,
        "attention_window": None,
        "attention_global_tokens": None,
        "gc_interval": None,
        "numa_binding": None,
        "pack_sequences": None,
    },
    combinations=(COMPILE_SELECTIVE,),
)
