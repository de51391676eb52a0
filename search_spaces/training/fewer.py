"""The two smaller counts, of micro-batches or layers, from which a step is extrapolated."""

import math

from search_spaces.models.model import Model, ModelSpec
from search_spaces.models.pipeline import FOLDED_SCHEDULES, ZERO_BUBBLE_SCHEDULES
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MICRO_BATCHES = "micro_batches"
"""Entry of `TrialResult.extrapolated` if a step's time comes from steps with fewer micro-batches."""
LAYERS = "layers"
"""Entry if time and memory come from models with fewer layers."""
FEWEST = 2
"""Minimum count: one micro-batch needs no accumulation buffer, and with one layer nothing is prefetched."""


def at_full(full: int, counts: tuple[int, int], first: float, second: float) -> float:
    """Linear extrapolation to the full count m: T(m) = T(m2) + (m - m2) (T(m2) - T(m1)) / (m2 - m1)."""
    return second + (full - counts[1]) * (second - first) / (counts[1] - counts[0])


def fewer_micro_batches(config: TrialConfig, workload: Workload, world_size: int, most: int | None) -> tuple[int, int] | None:
    """The counts `first < second <= most` whose steps are timed instead of full steps; None: full steps are timed.

    Step time is linear in the number of micro-batches from the first count to the full count, because:

    1. Both accumulate (at least two), as the full step does.
    2. Both fill the pipeline: at least its number of ranks, twice as many if a schedule folds it or fills its bubble.
    3. Both are multiples of the pipeline's ranks, as interleaved schedules require, and so must the full count be: otherwise
       the rounds have a different length.

    They are as far apart as possible, since the error of the slope falls with their distance.
    """
    full = config.gradient_accumulation_steps(workload.global_batch_size, world_size)
    if most is None or full <= most:
        return None
    ranks = config.pipeline_parallel_size
    if ranks > 1 and full % ranks:
        return None
    twice = config.pipeline_schedule in (*FOLDED_SCHEDULES, *ZERO_BUBBLE_SCHEDULES)
    first = max(FEWEST, ranks * (2 if ranks > 1 and twice else 1))
    second = most // ranks * ranks
    return (first, second) if second > first else None


def fewer_layers(config: TrialConfig, model: Model, most: int | None) -> tuple[int, int] | None:
    """The depths `first < second <= most` that are run instead of the full model; None: the full model is run.

    A step is linear in the number of layers from the first depth to the full depth, because:

    0. There is no `pipeline_layout`, which applies only to the full depth.
    1. Both give every pipeline stage the same number of layers, and a whole number of checkpointing groups of k layers and of
       patterns of layers with and without a window, as must the full depth.
    2. Both have at least two layers.

    They are as far apart as possible. If both together have as many layers as the model, nothing is saved: None.
    """
    if most is None or not isinstance(model, ModelSpec) or config.pipeline_layout:
        return None
    every = config.checkpoint_every_k if config.activation_checkpointing != "none" else 1
    stages = config.pipeline_parallel_size * config.virtual_stages
    unit = stages * model.layer_period if model.layer_period > 1 else stages
    unit = math.lcm(unit, every)
    first, second = unit * -(-FEWEST // unit), most // unit * unit
    if model.num_layers % unit or second <= first or first + second >= model.num_layers:
        return None
    return first, second
