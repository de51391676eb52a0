"""Exports a DeepSpeed configuration and the schedules of its data efficiency library (checked against DeepSpeed 0.19.8)."""

import json
from typing import Any

from autotune.exports import peft
from autotune.exports.checkpoints import Checkpoints
from autotune.exports.coverage import ExportTarget, unplaced_notes, unstated_note
from autotune.exports.export import Export, remarks
from autotune.exports.winner import Winner
from search_spaces.communication import INT8
from search_spaces.deepspeed.config import REDUCTION, deepspeed_config, offloads_a_part
from search_spaces.training.data_schedule import GRANULARITY, UNSCHEDULED_LAYERS
from search_spaces.trial_config import TrialConfig

METRIC = "seqlen_truncate"
"""The metric name by which Megatron-DeepSpeed truncates samples; DeepSpeed itself knows no name and truncates nothing."""
CLUSTERS = "data_clusters"
"""The folder in which DeepSpeed's sampler writes its sample lists."""


def data_efficiency(winner: Winner) -> dict[str, Any]:
    """The section `data_efficiency`; empty if nothing is scheduled."""
    sections = {**_sampling(winner), **_routing(winner)}
    return {"data_efficiency": {"enabled": True, "seed": winner.workload.seed, **sections}} if sections else {}


def data_notes(winner: Winner) -> list[str]:
    """Notes about what the program has to do besides the section."""
    config, notes = winner.config, []
    if config.curriculum_start_length:
        grown = f"over curriculum_steps={config.curriculum_steps}"
        notes.append(
            f"curriculum_start_length={config.curriculum_start_length} {grown}: as the metric {METRIC}, by which "
            "Megatron-DeepSpeed cuts samples; in any other program cut them to the sampler's current_difficulties"
        )
    if config.random_ltd_start_tokens:
        notes.append(
            f"random_ltd_start_tokens={config.random_ltd_start_tokens} over random_ltd_steps={config.random_ltd_steps}: wrap "
            "the layers with convert_to_random_ltd after deepspeed.initialize, and give them the rotations of the tokens that "
            "they see; every sample draws its own tokens there, not every step"
        )
    return notes


def _sampling(winner: Winner) -> dict[str, Any]:
    config = winner.config
    if not config.curriculum_start_length:
        return {}
    metric = {
        "index_to_sample_path": "dummy",
        "index_to_metric_path": "dummy",
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
        "min_difficulty": config.curriculum_start_length,
        "max_difficulty": winner.workload.sequence_length,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": config.curriculum_steps, "difficulty_step": GRANULARITY},
    }
    curriculum = {"enabled": True, "data_cluster_path": CLUSTERS, "curriculum_metrics": {METRIC: metric}}
    return {"data_sampling": {"enabled": True, "curriculum_learning": curriculum}}


def _routing(winner: Winner) -> dict[str, Any]:
    config, shape = winner.config, winner.shape
    if not config.random_ltd_start_tokens or shape is None:
        return {}
    dropped = {
        "enabled": True,
        "total_layer_num": shape.num_layers,
        "random_ltd_layer_num": shape.num_layers - UNSCHEDULED_LAYERS,
        "random_ltd_layer_id": [*range(1, shape.num_layers - 1)],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": config.random_ltd_start_tokens,
            "max_value": winner.workload.sequence_length,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": config.random_ltd_steps, "seq_per_step": GRANULARITY},
        },
    }
    return {"data_routing": {"enabled": True, "random_ltd": dropped}}


TARGET = ExportTarget(
    format="deepspeed",
    name="a DeepSpeed configuration",
    expressed=frozenset({
        "zero_stage", "micro_batch_size", "reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold",
        "max_live_parameters", "overlap_comm", "contiguous_gradients", "reduce_dtype", "precision", "offload_optimizer",
        "offload_param", "offload_ratio", "fused_optimizer", "hsdp_shard_size", "tensor_parallel_size", "reshard_after_forward",
        "accumulation_dtype", "optimizer", "onebit_warmup_steps", "gather_dtype", "secondary_shard_size",
        "activation_checkpointing", *peft.KNOBS,
        "curriculum_start_length", "curriculum_steps", "random_ltd_start_tokens", "random_ltd_steps",
    }),
    elsewhere={
        "offload_activations": "DeepSpeed's own checkpointing has cpu_checkpointing; else wrap the model's forward in "
        "torch.autograd.graph.save_on_cpu(pin_memory=True)",
        "allgather_bucket_size": "DeepSpeed accepts its key and never reads it",
        "sequence_parallel": "DeepSpeed's AutoTP keeps the norms' sequence whole",
        "pipeline_parallel_size": "build a deepspeed.pipe.PipelineModule, with the layers that launch.placement names",
        "virtual_stages": "a PipelineModule runs one stage a rank",
        "pipeline_schedule": "a PipelineModule runs 1F1B alone",
        "pipeline_split": "set the partition_method of the PipelineModule",
        "pipeline_layout": "give the PipelineModule these layers; it recomputes on every stage alike",
        "context_parallel_size": "DeepSpeed divides sequences by heads instead (Ulysses, deepspeed.sequence)",
        "context_parallel_method": "as sequence_parallel_size of UlyssesSPAttentionHF.register_with_transformers "
        "(deepspeed.runtime.sequence_parallel.ulysses_sp), whose groups are the mpu of deepspeed.initialize",
        "attention_window": "load the model with this sliding_window, where its class has one",
        "expert_parallel_size": "build the experts as deepspeed.moe.layer.MoE with this ep_size",
        "rank_order": "give the PipelineModule a topology with these axes",
        "checkpoint_every_k": "set it in the model (activation_checkpoint_interval of a PipelineModule)",
        "defer_gradient_reduction": "DeepSpeed reduces after every micro-batch at stage 2",
    },
)  # fmt: skip

OPTIMIZERS = {
    "lamb": "as Lamb, which bounds its ratios and under ZeRO takes norms of groups of parameters, not of each",
    "muon": "as Muon, which takes the parameters for matrices whose attribute use_muon is True, and the rest for AdamW's",
    "adamw8bit": "no type has 8-bit moments: give deepspeed.initialize a torchao.optim.AdamW8bit or bitsandbytes' AdamW8bit",
}
"""Optimizer -> its note."""
RECOMPUTATION = (
    "recomputation: the model switches on activation_checkpointing=full (`gradient_checkpointing_enable()` in Transformers)"
)
"""The note on full recomputation. It does not begin with the knob, because nothing is lost (`lossless`)."""
SAME = ("deepspeed",)
"""The engine that runs DeepSpeed itself."""


def export_deepspeed(winner: Winner) -> Export:
    """Return the JSON for `deepspeed.initialize(config=…)`; settings that it cannot express become notes."""
    notes = remarks(winner, deepspeed_notes(winner), Checkpoints.DEEPSPEED, SAME)
    return Export(text=json.dumps(deepspeed_document(winner), indent=2) + "\n", notes=notes)


def deepspeed_document(winner: Winner) -> dict[str, Any]:
    """The configuration as plain data."""
    config = winner.config
    content = _as_stated(deepspeed_config(config, winner.workload, winner.world_size, winner.model.parameter_count), winner)
    if _auto_tensor_parallel(config):
        content["tensor_parallel"] = {"autotp_size": config.tensor_parallel_size}
    return {**content, **data_efficiency(winner)}


def _as_stated(content: dict[str, Any], winner: Winner) -> dict[str, Any]:
    """A trial's configuration without the hyperparameters that the user did not state."""
    content_keys = {"clip": "gradient_clipping", "optimizer": "optimizer"}
    stated_content = {
        key: value
        for key, value in content.items()
        if key not in {content_keys[name] for name in winner.hyperparameters.missing(*content_keys)}
    }
    if "optimizer" in stated_content:
        unstated = winner.hyperparameters.missing("lr", "weight_decay")
        parameters = {name: value for name, value in stated_content["optimizer"]["params"].items() if name not in unstated}
        stated_content["optimizer"] = {**stated_content["optimizer"], "params": parameters}
    return stated_content


def _stated_notes(winner: Winner) -> list[str]:
    """Notes about hyperparameters. DeepSpeed reads those of an optimizer only beside its type."""
    config, notes = winner.config, []
    if winner.hyperparameters.optimizer is None:
        outcome = "left out, hand DeepSpeed the optimizer that your program makes"
        outcome += ", a DeepSpeedCPUAdam for states in main memory" if config.offload_optimizer != "none" else ""
        notes += unstated_note(winner, outcome, "optimizer")
        if not config.fused_optimizer:
            notes.append("fused_optimizer=False: choose it where the optimizer is made")
    if winner.hyperparameters.optimizer is None or config.optimizer == "adamw8bit":
        yours = "DeepSpeed reads it beside a type of optimizer alone; give it to your own optimizer"
        notes += unplaced_notes(winner, yours, "lr", "weight_decay")
    else:
        notes += unstated_note(winner, "left out, DeepSpeed's own defaults hold", "lr", "weight_decay")
    return [*notes, *unstated_note(winner, "left out, DeepSpeed does not clip", "clip")]


def deepspeed_notes(winner: Winner) -> list[str]:
    """Notes about what the configuration cannot express, or what DeepSpeed does not do."""
    config = winner.config
    notes = [*peft.peft_notes(winner), *data_notes(winner), *_stated_notes(winner)]
    if config.zero_stage == 0:
        changed, why = config.differences(TrialConfig()), "at stage 0 DeepSpeed reduces after backward, in buckets of its own"
        notes += [f"{name}={changed[name]}: {why}" for name in REDUCTION if name in changed]
    if config.activation_checkpointing == "full":
        notes.append(RECOMPUTATION)
    elif config.activation_checkpointing != "none":
        notes.append(f"activation_checkpointing={config.activation_checkpointing}: select what is kept in the model's own code")
    if config.precision == "fp64":
        notes.append("precision=fp64: cast the model to double before it is handed over")
    if config.precision == "fp8":
        notes.append("precision=fp8: as bf16; convert the model with torchao.float8.convert_to_float8_training beforehand")
    if config.optimizer in OPTIMIZERS:
        notes.append(f"optimizer={config.optimizer}: {OPTIMIZERS[config.optimizer]}")
    if config.pipeline_parallel_size > 1 and config.zero_stage >= 2:
        notes.append(f"zero_stage={config.zero_stage} in a pipeline: DeepSpeed refuses stages 2 and 3 there; use stage 1")
    if config.tensor_parallel_size > 1:
        notes.append(f"tensor_parallel_size={config.tensor_parallel_size}: {_tensor_remedy(config)}")
    notes += _compression_notes(config)
    if config.hsdp_shard_size and not config.secondary_shard_size:
        notes.append(
            f"hsdp_shard_size={config.hsdp_shard_size}: as zero_hpz_partition_size, which keeps a second copy of the "
            "parameters near, and shards optimizer state and gradients over all ranks"
        )
    if "nvme" in (config.offload_optimizer, config.offload_param) and winner.workload.nvme_path is None:
        notes.append("nvme_path: no folder is named for what goes to files; write one into the configuration")
    return notes + _offload_notes(config) + TARGET.unexpressed(config)


def _compression_notes(config: TrialConfig) -> list[str]:
    """ZeRO++ has equivalent keys; 1-bit Adam no longer has any."""
    notes = []
    if config.gather_dtype == INT8:
        notes.append("gather_dtype=int8: as zero_quantized_weights, whose kernels are CUDA's")
    if config.secondary_shard_size:
        notes.append(f"secondary_shard_size={config.secondary_shard_size}: as zero_hpz_partition_size, for backward alone")
        if config.hsdp_shard_size:
            difference = "states and gradients are sharded over all ranks there"
            notes.append(f"hsdp_shard_size={config.hsdp_shard_size}: {difference}")
    if config.reduce_dtype == INT8:
        unsupported = "DeepSpeed sends integers at stage 3 alone; fp32 is written"
        notes.append(f"reduce_dtype=int8: {'as zero_quantized_gradients' if config.zero_stage == 3 else unsupported}")
    if config.optimizer == "onebit_adam":
        notes += [
            "optimizer=onebit_adam: DeepSpeed 0.19.8 has no 1-bit Adam any more, AdamW is written; older ones have OneBitAdam",
            f"onebit_warmup_steps={config.onebit_warmup_steps}: as the freeze_step of OneBitAdam, where there is one",
        ]
    return notes


def _offload_notes(config: TrialConfig) -> list[str]:
    notes = []
    if config.offload_optimizer == "nvme" and config.zero_stage < 3:
        notes.append(f"offload_optimizer=nvme: DeepSpeed offloads to files at stage 3 alone, not at stage {config.zero_stage}")
    if offloads_a_part(config) and not config.fused_optimizer:
        notes.append("fused_optimizer=False: DeepSpeed offloads a part with its own Adam alone, which is left to it")
    elif config.offload_optimizer != "none" and config.offload_ratio < 1.0 and config.zero_stage < 3:
        notes.append(f"offload_ratio={config.offload_ratio}: DeepSpeed offloads a part at stage 3 alone; here it offloads all")
    return notes


def _auto_tensor_parallel(config: TrialConfig) -> bool:
    return config.tensor_parallel_size > 1 and config.pipeline_parallel_size == 1


def _tensor_remedy(config: TrialConfig) -> str:
    if not _auto_tensor_parallel(config):
        return "DeepSpeed's AutoTP hangs in a PipelineModule; divide the layers yourself"
    return "as autotp_size; DeepSpeed's AutoTP needs a partition_config too for a model that is none of Hugging Face's"
