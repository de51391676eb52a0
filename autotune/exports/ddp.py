"""What every target that trains by torch's DistributedDataParallel has to be told."""

from search_spaces.compression import INT8
from search_spaces.trial_config import TrialConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Of an element of a reduction, by its type."""


def bucket_megabytes(config: TrialConfig) -> int:
    """The bucket of reductions as `bucket_cap_mb` counts it; at least 1."""
    return max(config.reduce_bucket_size * BYTES[sent_dtype(config)] // 2**20, 1)


def sent_dtype(config: TrialConfig) -> str:
    """The type that torch reduces gradients in: it sends no integers."""
    return "fp32" if config.reduce_dtype == INT8 else config.reduce_dtype
