"""Settings that fused kernels cannot be combined with. Does not import torch, since the search reads it."""

from search_spaces.capability import Combination
from search_spaces.fused_kernels import FUSED_KERNELS, LIGER, NONE, OFF
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.models.stage_layout import marks_recomputation, policies
from search_spaces.trial_config import TrialConfig


def _runs_backward_in_parts(config: TrialConfig, _: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return config.fused_kernels != NONE and split


def _recalls_products(config: TrialConfig, _: int) -> bool:
    selective = config.activation_checkpointing == "selective"
    return config.fused_kernels == LIGER and (selective or (marks_recomputation(config) and "selective" in policies(config)))


FUSED = (
    Combination(
        rule="fused-kernels-zero-bubble",
        reads=(FUSED_KERNELS, "pipeline_parallel_size", "pipeline_schedule"),
        problem="zero-bubble schedules run backward once for inputs and once for weights, but the backward of these kernels "
        "can run only once",
        remedy=f"use another schedule, or {OFF}",
        holds=_runs_backward_in_parts,
    ),
    Combination(
        rule="fused-kernels-selective",
        reads=(FUSED_KERNELS, "activation_checkpointing", "pipeline_layout"),
        problem="Liger rotates queries and keys in place, so those that selective checkpointing saves would be rotated twice",
        remedy=f"use full or no recomputation (mark no stage with s), or {OFF}",
        holds=_recalls_products,
    ),
)
