"""The second stage: knobs that only cut communication and the loss, tuned around the best configuration."""

from collections.abc import Mapping, Sequence

from autotune.prediction.planning.scan import APART
from search_spaces.space import SearchSpace
from search_spaces.trial_config import TrialConfig

ACTS_ON: Mapping[str, tuple[str, ...]] = {
    "reduce_bucket_size": ("data",),
    "allgather_bucket_size": ("data",),
    "prefetch_bucket_size": ("data",),
    "param_persistence_threshold": ("data",),
    "max_live_parameters": ("data",),
    "overlap_comm": ("data",),
    "overlap_param_gather": ("data",),
    "async_tensor_parallel": ("tensor",),
    "contiguous_gradients": ("data",),
    "loss_chunk_size": ("compute",),
    "fused_optimizer": ("optimizer",),
    "rank_order": ("data", "tensor", "pipeline"),
    "expandable_segments": ("compute",),
    "compile_blocks": ("compute",),
    "gc_interval": ("compute",),
    "numa_binding": ("compute", "data", "optimizer", "offload"),
}
"""Knob -> the parts of a step (`step.PARTS`) that it changes."""
LEAST_SHARE = 0.01
"""Share of the step that a knob must act on: no move gains more than that."""


def moves(space: SearchSpace, best: TrialConfig, parts: Mapping[str, float], measured: float) -> Sequence[TrialConfig]:
    """Legal configurations one such move away from the best, of the knobs that act on something.

    What a knob acts on is bounded by what was measured: its parts as predicted, and all that the prediction does not explain.

    Args:
        space: what may be chosen.
        best: the best so far.
        parts: predicted seconds of a step by part.
        measured: seconds of a step.
    """
    unexplained = max(measured - sum(parts.values()), 0.0)
    found: dict[TrialConfig, None] = {}
    for knob in (name for name in space.domains if name in APART):
        acted_on = sum(parts.get(part, 0.0) for part in ACTS_ON[knob]) + unexplained
        if acted_on < LEAST_SHARE * measured:
            continue
        for value in space.domains[knob]:
            moved = space.admitted(best.replace({knob: value}))
            if moved != best and not space.check(moved):
                found[moved] = None
    return list(found)
