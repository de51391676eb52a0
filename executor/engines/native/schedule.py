"""The order in which the ranks of a pipeline run a step, as torch's schedules have it: for who draws it, without any rank."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from executor.engines.native.pipeline import SCHEDULES
from executor.engines.native.schedule_actions import Action, ActionKind
from search_spaces.pipeline import stages_of_rank
from search_spaces.trial_config import TrialConfig

_KINDS = {
    "F": ActionKind.FORWARD, "B": ActionKind.BACKWARD, "I": ActionKind.INPUT_GRADIENT, "W": ActionKind.WEIGHT_GRADIENT,
}  # fmt: skip


def actions_of(config: TrialConfig, micro_batches: int) -> list[list[Action]]:
    """What each rank of the pipeline computes in a step, in its order: the order that `Pipeline` runs.

    torch's schedules work it out for all ranks when they are made, and look at the stages of one for their numbers alone.
    """
    kind = SCHEDULES[config.pipeline_schedule]
    ranks, stages = config.pipeline_parallel_size, config.pipeline_parallel_size * config.virtual_stages
    held: list[Any] = [
        SimpleNamespace(
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            stage_index=stage,
            is_first=stage == 0,
            is_last=stage == stages - 1,
            submod=None,
        )
        for stage in stages_of_rank(config, 0)
    ]
    with _quiet("torch.distributed.pipelining.schedules"):
        made: Any = kind(held[0] if issubclass(kind, PipelineScheduleSingle) else held, micro_batches, loss_fn=_no_loss)  # type: ignore[arg-type]
    return [[told for action in made.pipeline_order[rank] for told in _told(action)] for rank in range(ranks)]


def _told(action: Any) -> Iterator[Action]:
    """Nothing of waits and of communication; those that may overlap, one after the other, as torch runs them by default."""
    if action is None:
        return
    for part in action.sub_actions or (action,):
        if (kind := _KINDS.get(part.computation_type.value)) is not None:
            yield Action(part.stage_index, kind, part.microbatch_index)


def _no_loss(*_: Any) -> Any:
    """A schedule without a loss would leave out backward; it is never called."""
    raise RuntimeError("a schedule that is looked at is not run")


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the advice that torch gives whoever runs the schedule."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
