"""The orders of pipelines against torch's own schedules, which are what ranks run."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from executor.parallel.pipeline import SCHEDULES
from executor.parallel.schedule import actions_of
from search_spaces.models.pipeline import FOLDED_SCHEDULES, ONE_STAGE_SCHEDULES, stages_of_rank
from search_spaces.trial_config import TrialConfig

KINDS = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
Rows = list[list[tuple[int, str, int]]]


def of_torch(config: TrialConfig, micro_batches: int) -> Rows:
    """torch's schedules work the orders of all ranks out when they are made, and look at the stages for their numbers alone."""
    kind = SCHEDULES[config.pipeline_schedule]
    ranks, stages = config.pipeline_parallel_size, config.pipeline_parallel_size * config.virtual_stages
    held: Any = [
        SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, stage_index=stage, submod=None,
                        is_first=stage == 0, is_last=stage == stages - 1)
        for stage in stages_of_rank(config, 0)
    ]  # fmt: skip
    made: Any = kind(held[0] if issubclass(kind, PipelineScheduleSingle) else held, micro_batches, loss_fn=lambda *_: None)
    rows = [[told for action in made.pipeline_order[rank] for told in told_by(action)] for rank in range(ranks)]
    if config.pipeline_schedule == "1f1b":
        # torch's table numbers the forwards of the last rank from 1, which is not what its step runs.
        rows[-1] = [(stage, kind, batch - (kind == "forward")) for stage, kind, batch in rows[-1]]
    return rows


def told_by(action: Any) -> Rows | list[Any]:
    parts = () if action is None else action.sub_actions or (action,)
    return [
        (part.stage_index, KINDS[part.computation_type.value], part.microbatch_index)
        for part in parts
        if part.computation_type.value in KINDS
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_rank_computes_in_the_order_of_torch(schedule: str, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    virtual = (1,) if schedule in ONE_STAGE_SCHEDULES else (2,) if schedule in FOLDED_SCHEDULES else (2, 3)
    for stages in virtual:
        config = TrialConfig(pipeline_parallel_size=ranks, virtual_stages=stages, pipeline_schedule=schedule)
        for micro_batches in (2 * ranks, 4 * ranks, 2 * ranks + (schedule in ("gpipe", "1f1b", "zbv", "dualpipev"))):
            ours = [
                [(one.stage, one.kind.value, one.micro_batch) for one in order] for order in actions_of(config, micro_batches)
            ]
            assert ours == of_torch(config, micro_batches)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "looped_bfs", "zbv", "gpipe"])
def test_fewer_micro_batches_than_ranks(schedule: str) -> None:
    config = TrialConfig(pipeline_parallel_size=4, virtual_stages=1 if schedule == "gpipe" else 2, pipeline_schedule=schedule)
    for micro_batches in (1, 2, 3):
        ours = [[(one.stage, one.kind.value, one.micro_batch) for one in order] for order in actions_of(config, micro_batches)]
        assert ours == of_torch(config, micro_batches)
