"""Best configurations of three kinds, each in every format that has a place for it."""

from pathlib import Path
from typing import Any

import exported

CASES = ("ddp", "zero-3", "3d")
SUFFIXES = {
    "json": "json", "deepspeed": "json", "accelerate-fsdp": "yaml", "accelerate-deepspeed": "yaml", "transformers": "json",
    "torchtitan": "sh", "megatron": "sh", "lightning": "py.txt", "torch": "py.txt", "ray": "py.txt", "slurm": "sh",
    "torchrun": "sh",
}  # fmt: skip
REFUSED = {(name, "3d") for name in ("accelerate-fsdp", "accelerate-deepspeed", "transformers", "lightning")}
"""Formats that have no pipelines."""
WRITTEN = [(name, case) for name in SUFFIXES for case in CASES if name != "json" and (name, case) not in REFUSED]


def best(case: str, folder: Path) -> dict[str, Any]:
    """The document of a case."""
    if case == "ddp":
        return exported.document(exported.small(folder), micro_batch_size=2, reduce_bucket_size=20_000)
    if case == "zero-3":
        return exported.document(
            exported.large(), {"zero_stage": 1, "precision": "bf16"}, zero_stage=3, micro_batch_size=2, precision="bf16",
            reduce_bucket_size=100_000_000, prefetch_bucket_size=20_000_000, param_persistence_threshold=1_000_000,
            activation_checkpointing="full", expandable_segments=True,
        )  # fmt: skip
    return exported.document(
        exported.large(), {"zero_stage": 1, "precision": "bf16"}, zero_stage=1, micro_batch_size=2, precision="bf16",
        tensor_parallel_size=4, sequence_parallel=True, pipeline_parallel_size=2, virtual_stages=2,
        pipeline_schedule="interleaved_1f1b", activation_checkpointing="selective",
    )  # fmt: skip
