"""Rules of pipelines against torch: refused is what torch.distributed.pipelining cannot construct or would never finish."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from search_spaces.capability import SpaceContext
from search_spaces.models.pipeline import FOLDED_SCHEDULES, ONE_STAGE_SCHEDULES, stages_of_rank
from search_spaces.rules.parallelism import ONE_STAGE_EQUALS
from search_spaces.rules.table import check_config
from search_spaces.trial_config import TrialConfig

CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}
RANKS = (2, 3, 4)
VIRTUAL_STAGES = (1, 2, 3)
MICRO_BATCHES = (*range(1, 14), 16, 21)


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("schedule", CLASSES)
def test_the_rules_refuse_what_torch_does(make_context: Any, schedule: str) -> None:
    for ranks in RANKS:
        for virtual in VIRTUAL_STAGES:
            for count in MICRO_BATCHES:
                if virtual == 1 and schedule in ONE_STAGE_EQUALS:
                    continue  # the next test
                ours, theirs = (
                    refused(make_context, schedule, ranks, virtual, count),
                    impossible(schedule, ranks, virtual, count),
                )
                assert bool(ours) == bool(theirs), (schedule, ranks, virtual, count, ours, theirs)


@pytest.mark.parametrize("schedule", ONE_STAGE_EQUALS)
def test_a_second_name_for_a_schedule_is_refused(make_context: Any, schedule: str) -> None:
    assert refused(make_context, schedule, 2, 1, 4) == ["virtual-stages"]
    assert impossible(schedule, 2, 1, 4) is None


@pytest.mark.parametrize("schedule", [name for name in CLASSES if name not in ONE_STAGE_SCHEDULES])
def test_stages_are_on_the_ranks_where_torch_expects_them(schedule: str) -> None:
    for ranks in RANKS:
        virtual = 2 if schedule in FOLDED_SCHEDULES else 3
        config = TrialConfig(pipeline_parallel_size=ranks, virtual_stages=virtual, pipeline_schedule=schedule)
        made = build(schedule, ranks, virtual, 2 * ranks)
        ours = {stage: rank for rank in range(ranks) for stage in stages_of_rank(config, rank)}
        assert dict(made.stage_index_to_group_rank) == ours


def refused(make_context: Any, schedule: str, ranks: int, virtual: int, count: int) -> list[str]:
    """The rules that refuse it for a model of enough layers, one replica."""
    context: SpaceContext = make_context(model="llama-2-7b", batch=count)
    config = TrialConfig(pipeline_parallel_size=ranks, virtual_stages=virtual, pipeline_schedule=schedule)
    here = SpaceContext(model=context.model, cluster=context.cluster, workload=context.workload, world_size=ranks)
    return [refusal.rule for refusal in check_config(config, here)]


def impossible(schedule: str, ranks: int, virtual: int, count: int) -> str | None:
    """Why torch cannot run it; None: it can."""
    if schedule in ONE_STAGE_SCHEDULES and virtual != 1:
        return "takes one stage"
    try:
        made = build(schedule, ranks, virtual, count)
    except ValueError as error:
        return str(error)
    return None if schedule in ONE_STAGE_SCHEDULES or finishes(made, ranks * virtual) else "never finishes"


def build(schedule: str, ranks: int, virtual: int, count: int) -> Any:
    """The schedule of the first rank over stages that only say where they are: constructors ask for no more."""
    stages = [
        SimpleNamespace(
            stage_index=index * ranks, num_stages=ranks * virtual, group_size=ranks, group_rank=0, submod=None,
            is_first=index == 0, is_last=False, has_backward=True,
        )
        for index in range(virtual)
    ]  # fmt: skip
    return CLASSES[schedule](stages[0] if schedule in ONE_STAGE_SCHEDULES else stages, n_microbatches=count)


def finishes(made: Any, stages: int) -> bool:
    """Whether every rank comes to the end of its actions, each of which waits for what it needs: no ranks wait in a ring."""
    left = {rank: list(actions) for rank, actions in made.pipeline_order_with_comms.items()}
    done: set[tuple[str, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for actions in left.values():
            while actions and all(is_ready(part, made, stages, done) for part in parts(actions[0])):
                done |= {
                    (str(part.computation_type), part.stage_index, part.microbatch_index) for part in parts(actions.pop(0))
                }
                moved = True
    return not any(left.values())


def parts(action: Any) -> tuple[Any, ...]:
    return (action,) if action.sub_actions is None else tuple(action.sub_actions)


def is_ready(action: Any, made: Any, stages: int, done: set[tuple[str, int, int]]) -> bool:
    kind, stage, batch = str(action.computation_type), action.stage_index, action.microbatch_index
    place = made.stage_index_to_group_rank

    def is_done(*names: str, at: int = stage) -> bool:
        return any((name, at, batch) in done for name in names)

    def arrived(names: tuple[str, ...], received: str, source: int) -> bool:
        if not 0 <= source < stages:
            return True  # the first stage has its input, the last its loss
        return is_done(*names, at=source) if place[source] == place[stage] else is_done(received)

    match kind:
        case "F":
            return arrived(("F",), "RECV_F", stage - 1)
        case "B" | "I":
            return is_done("F") and arrived(("B", "I"), "RECV_B", stage + 1)
        case "W":
            return is_done("I")
        case "SEND_F":
            return is_done("F")
        case "SEND_B":
            return is_done("B", "I")
        case "RECV_F":
            return is_done("SEND_F", at=stage - 1)
        case "RECV_B":
            return is_done("SEND_B", at=stage + 1)
    return True  # gathering, releasing and reducing wait for no other rank
