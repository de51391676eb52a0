"""The two smaller counts, of micro-batches or of layers, from which a step is extrapolated."""

import math

from search_spaces.models.model import Model, ModelSpec
from search_spaces.models.pipeline import FOLDED_SCHEDULES, ZERO_BUBBLE_SCHEDULES
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MICRO_BATCHES = "micro_batches"
"""What `TrialResult.extrapolated` names where a step's time comes from steps of fewer micro-batches."""
LAYERS = "layers"
"""What it names where time and memory come from models of fewer layers."""
FEWEST = 2
"""A step of one micro-batch accumulates nothing, and needs no buffer to do so; of one layer nothing is gathered ahead."""


def at_full(full: int, counts: tuple[int, int], first: float, second: float) -> float:
    """The value at the full count m of what grows by the same for each: T(m) = T(m2) + (m - m2) (T(m2) - T(m1)) / (m2 - m1)."""
    return second + (full - counts[1]) * (second - first) / (counts[1] - counts[0])


def fewer_micro_batches(config: TrialConfig, workload: Workload, world_size: int, most: int | None) -> tuple[int, int] | None:
    """The counts `first < second <= most` whose steps are timed in place of full ones; None: full steps are timed.

    Between them and to the full count a step grows by the same for every micro-batch:

    1. Both accumulate (at least two), as the full step does.
    2. Both fill the pipeline: as many as it has ranks, twice as many where a schedule folds it or fills its bubble.
    3. Both are multiples of the pipeline's ranks, as interleaved schedules ask for, and as the full count must be then:
       a step that is no multiple runs in rounds of another length.

    They are as far apart as they can be, since the error of the slope falls with their distance.
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
    """The depths `first < second <= most` that are run in place of the model's own; None: the whole model is.

    Between them and to the full depth a step grows by the same for every layer:

    0. The layers of stages are not written out one by one, which is of the full depth alone.
    1. Both give every pipeline stage as many layers, and end with a whole group of layers where every k-th is checkpointed,
       as the full depth must.
    2. Both have two layers at least.

    They are as far apart as they can be. Where the two together are no fewer layers than the model has, nothing is saved.
    """
    if most is None or not isinstance(model, ModelSpec) or config.pipeline_layout:
        return None
    every = config.checkpoint_every_k if config.activation_checkpointing != "none" else 1
    unit = math.lcm(config.pipeline_parallel_size * config.virtual_stages, every)
    first, second = unit * -(-FEWEST // unit), most // unit * unit
    if model.num_layers % unit or second <= first or first + second >= model.num_layers:
        return None
    return first, second
