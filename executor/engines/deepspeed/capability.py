"""What the deepspeed engine honours and refuses, and whether the package is usable. Imports neither torch nor DeepSpeed."""

import importlib.metadata
import re

from search_spaces.capability import Capability, Combination, honoured_by
from search_spaces.deepspeed import REDUCTION
from search_spaces.errors import Refusal
from search_spaces.trial_config import TrialConfig

PACKAGE = "deepspeed"
LEAST_VERSION = (0, 19)
"""Older versions have no partition_config for AutoTP and cannot free the memory of an engine."""
INSTALL = "pip install 'autotune-parallel[deepspeed]'"
_DEFAULTS = TrialConfig()


def installed_version() -> str | None:
    """The installed version of the package; None: it is not installed."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def unusable(version: str | None) -> Refusal | None:
    """Why this version (None: not installed) cannot run trials; None: it can."""
    if version is None:
        return Refusal("deepspeed-installed", "the package is not installed", INSTALL)
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return Refusal("deepspeed-version", f"the package is {version}, but {least} is the oldest supported version", INSTALL)
    return None


DEEPSPEED = Capability(
    engine="deepspeed",
    knobs=honoured_by(
        "deepspeed",
        {
            "reduce_dtype": ("fp32", "bf16"),
            "offload_optimizer": ("none", "cpu"),
            "offload_param": ("none", "cpu"),
            "precision": ("fp32", "bf16"),
        },
    ),
    specific=frozenset({"micro_batch_size", "reduce_bucket_size"}),
    combinations=(
        Combination(
            rule="deepspeed-pipeline-stage",
            reads=("pipeline_parallel_size", "zero_stage"),
            problem="a PipelineModule supports only ZeRO stages 0 and 1",
            remedy="use zero_stage 0 or 1, or the native engine",
            holds=lambda config, _: config.pipeline_parallel_size > 1 and config.zero_stage >= 2,
        ),
        Combination(
            rule="deepspeed-pipeline-tensor",
            reads=("pipeline_parallel_size", "tensor_parallel_size"),
            problem="AutoTP inside a PipelineModule never ends its first step",
            remedy="use one of the two, or the native engine",
            holds=lambda config, _: config.pipeline_parallel_size > 1 and config.tensor_parallel_size > 1,
        ),
        Combination(
            rule="deepspeed-pipeline-overlap",
            reads=("pipeline_parallel_size", "overlap_comm"),
            problem="a PipelineModule never overlaps reduction with backward, whatever overlap_comm says",
            remedy="leave overlap_comm at true",
            holds=lambda config, _: config.pipeline_parallel_size > 1 and not config.overlap_comm,
        ),
        Combination(
            rule="deepspeed-stage-0-reduction",
            reads=("zero_stage", *REDUCTION),
            problem="at stage 0 DeepSpeed reduces after backward in its own buckets and ignores these knobs",
            remedy="leave them at their defaults, or use a higher zero_stage",
            holds=lambda config, _: (
                config.zero_stage == 0 and any(getattr(config, name) != getattr(_DEFAULTS, name) for name in REDUCTION)
            ),
        ),
        Combination(
            rule="deepspeed-bf16-norm",
            reads=("precision", "zero_stage", "tensor_parallel_size", "pipeline_parallel_size"),
            problem="at stage 0 in bf16 DeepSpeed clips by a norm that omits the parameters of other tensor or pipeline ranks",
            remedy="use zero_stage=1 or precision=fp32",
            holds=lambda config, _: (
                config.precision == "bf16"
                and config.zero_stage == 0
                and (config.tensor_parallel_size > 1 or config.pipeline_parallel_size > 1)
            ),
        ),
        Combination(
            rule="deepspeed-offload-contiguous",
            reads=("offload_optimizer", "contiguous_gradients"),
            problem="offloading copies gradients into one buffer and ignores contiguous_gradients",
            remedy="leave contiguous_gradients at true",
            holds=lambda config, _: config.offload_optimizer != "none" and not config.contiguous_gradients,
        ),
        Combination(
            rule="deepspeed-hpz-off",
            reads=("hsdp_shard_size",),
            problem="zero_hpz_partition_size=1 turns hpZ off",
            remedy="set hsdp_shard_size to at least 2, or use stage 2, which keeps parameters whole",
            holds=lambda config, _: config.hsdp_shard_size == 1,
        ),
        Combination(
            rule="deepspeed-hpz-tensor",
            reads=("hsdp_shard_size", "tensor_parallel_size"),
            problem="hpZ takes its groups from consecutive ranks, which hold different slices under AutoTP",
            remedy="use one of the two, or the native engine",
            holds=lambda config, _: config.hsdp_shard_size > 1 and config.tensor_parallel_size > 1,
        ),
    ),
    divides_states_over_all_ranks=True,
)
"""The deepspeed engine. Settings that DeepSpeed accepts but never reads (`allgather_bucket_size`) are not honoured."""
