"""A DeepSpeed configuration (checked against DeepSpeed 0.19.8)."""

import json
from typing import Any

from autotune.best_config import request_of
from autotune.exports.export import Export
from search_spaces.deepspeed_config import deepspeed_config
from search_spaces.trial_config import TrialConfig

EXPRESSED = frozenset({
    "zero_stage", "micro_batch_size", "reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size",
    "param_persistence_threshold", "max_live_parameters", "overlap_comm", "contiguous_gradients", "reduce_dtype", "precision",
    "offload_optimizer", "offload_param", "offload_ratio", "fused_optimizer", "reshard_after_forward",
})  # fmt: skip
"""Knobs that have a place in the format."""

ELSEWHERE = {
    "activation_checkpointing": "switch it on in the model (`model.gradient_checkpointing_enable()` in Transformers)",
    "tensor_parallel_size": "DeepSpeed's AutoTP needs a partition_config for the model",
    "sequence_parallel": "DeepSpeed's AutoTP keeps the norms' sequence whole",
    "pipeline_parallel_size": "build the model as a deepspeed.pipe.PipelineModule, with the layers that launch.placement names",
    "virtual_stages": "a PipelineModule runs one stage a rank",
    "pipeline_schedule": "a PipelineModule runs 1F1B alone",
    "pipeline_split": "set the partition_method of the PipelineModule",
    "context_parallel_size": "DeepSpeed divides sequences by heads instead (Ulysses, deepspeed.sequence)",
    "rank_order": "give the PipelineModule a topology with these axes",
    "checkpoint_every_k": "set it in the model (activation_checkpoint_interval of a PipelineModule)",
    "expandable_segments": "set PYTORCH_ALLOC_CONF=expandable_segments:True",
    "defer_gradient_reduction": "DeepSpeed reduces after every micro-batch at stage 2",
}
"""Knobs without a place there -> what to do about them."""


def export_deepspeed(best: dict[str, Any]) -> Export:
    """Return the JSON for `deepspeed.initialize(config=…)`; what it cannot say comes as notes.

    Raises:
        BestConfigError: the document's request cannot be read.
    """
    config = TrialConfig().replace(best["best"]["config"])
    workload, world_size, parameter_count = (
        request_of(best).workload,
        best["launch"]["world_size"],
        best["model"]["parameter_count"],
    )
    content = deepspeed_config(config, workload, world_size, parameter_count)
    return Export(text=json.dumps(content, indent=2) + "\n", notes=tuple(_notes(config, parameter_count)))


def _notes(config: TrialConfig, parameter_count: int) -> list[str]:
    notes = []
    if config.zero_stage in (1, 2) and config.allgather_bucket_size < parameter_count:
        notes.append(f"allgather_bucket_size={config.allgather_bucket_size}: DeepSpeed accepts it and never reads it")
    if config.precision == "fp64":
        notes.append("precision=fp64: cast the model to double before it is handed over")
    if config.pipeline_parallel_size > 1 and config.zero_stage >= 2:
        notes.append(f"zero_stage={config.zero_stage} in a pipeline: DeepSpeed refuses stages 2 and 3 there; use stage 1")
    if config.pipeline_parallel_size > 1 and config.tensor_parallel_size > 1:
        notes.append(
            "tensor parallelism in a pipeline: DeepSpeed's AutoTP hangs in a PipelineModule; divide the layers yourself"
        )
    for name, value in config.differences(TrialConfig()).items():
        if name not in EXPRESSED:
            notes.append(f"{name}={value}: not part of a DeepSpeed configuration; {ELSEWHERE.get(name, 'it is left out')}")
    return notes
