"""The two smaller counts of micro-batches from which a step's time is extrapolated."""

from search_spaces.pipeline import FOLDED_SCHEDULES, ZERO_BUBBLE_SCHEDULES
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig

MICRO_BATCHES = "micro_batches"
"""What `TrialResult.extrapolated` names where a step's time comes from steps of fewer micro-batches."""
FEWEST = 2
"""A step of one micro-batch accumulates nothing, and needs no buffer to do so."""


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
