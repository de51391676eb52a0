"""Data schedules in the format of DeepSpeed's data efficiency library (checked against DeepSpeed 0.19.8)."""

from typing import Any

from autotune.exports.winner import Winner
from search_spaces.training.data_schedule import GRANULARITY, UNSCHEDULED_LAYERS

KNOBS = frozenset({"curriculum_start_length", "curriculum_steps", "random_ltd_start_tokens", "random_ltd_steps"})
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
