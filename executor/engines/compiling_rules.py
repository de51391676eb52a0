"""Settings that compiled blocks cannot be combined with, on every engine. Does not import torch, since the search reads it."""

from search_spaces.capability import Combination
from search_spaces.models.pipeline import ZERO_BUBBLE_SCHEDULES
from search_spaces.trial_config import TrialConfig


def _keeps_single_operators(config: TrialConfig, _: int) -> bool:
    return config.compile_blocks and config.activation_checkpointing == "selective"


def _runs_backward_in_parts(config: TrialConfig, _: int) -> bool:
    split = config.pipeline_parallel_size > 1 and config.pipeline_schedule in ZERO_BUBBLE_SCHEDULES
    return config.compile_blocks and split


COMPILE_SELECTIVE = Combination(
    rule="compile-selective",
    reads=("compile_blocks", "activation_checkpointing"),
    problem="selective checkpointing intercepts single operators, and torch.compile does not compile intercepted code",
    remedy="set compile_blocks=false, or activation_checkpointing to none or full",
    holds=_keeps_single_operators,
)
COMPILE_ZERO_BUBBLE = Combination(
    rule="compile-zero-bubble",
    reads=("compile_blocks", "pipeline_parallel_size", "pipeline_schedule"),
    problem="zero-bubble schedules run backward in two parts, and a compiled block has one",
    remedy="set compile_blocks=false, or use another schedule",
    holds=_runs_backward_in_parts,
)
