"""What every target that trains by torch's DistributedDataParallel has to be told."""

from search_spaces.trial_config import TrialConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of an element of a reduction, by its type."""


def bucket_megabytes(config: TrialConfig) -> int:
    """The bucket of reductions as `bucket_cap_mb` counts it; at least 1."""
    return max(config.reduce_bucket_size * BYTES[config.reduce_dtype] // 2**20, 1)
