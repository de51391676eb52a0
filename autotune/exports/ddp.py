"""Settings that every target based on torch's DistributedDataParallel needs."""

from search_spaces.compression import INT8
from search_spaces.trial_config import TrialConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per element of a reduction, by dtype."""


def bucket_megabytes(config: TrialConfig) -> int:
    """The reduction bucket size in the unit of `bucket_cap_mb` (MiB); at least 1."""
    return max(config.reduce_bucket_size * BYTES[sent_dtype(config)] // 2**20, 1)


def sent_dtype(config: TrialConfig) -> str:
    """The dtype in which torch reduces gradients; it does not send integers."""
    return "fp32" if config.reduce_dtype == INT8 else config.reduce_dtype
