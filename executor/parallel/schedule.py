"""The order in which each rank of a pipeline computes a step, as in torch's schedules, but without torch and without ranks.

`Pipeline` runs torch's schedules; tests compare the two. This module does not import torch, so that schedules can be drawn
without loading it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from search_spaces.models.pipeline import stages_of_rank
from search_spaces.trial_config import TrialConfig


class ActionKind(StrEnum):
    """What a stage does with a micro-batch. The values are exported: never rename one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs and of weights in one backward."""
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


@dataclass(frozen=True, slots=True)
class Action:
    """One computation of a rank."""

    stage: int
    kind: ActionKind
    micro_batch: int


FORWARD, BACKWARD, INPUT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT


def actions_of(config: TrialConfig, micro_batches: int) -> list[list[Action]]:
    """The ordered actions of each rank of the pipeline in a step of `micro_batches`."""
    order = _ORDERS[config.pipeline_schedule]
    ranks = config.pipeline_parallel_size
    return [order(_PipelineRank(rank, ranks, stages_of_rank(config, rank), micro_batches)) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class _PipelineRank:
    """A rank of the pipeline and its stages."""

    rank: int
    ranks: int
    stages: tuple[int, ...]
    micro_batches: int


class _Order:
    """The list of a rank's actions; each added action is for the stage's next micro-batch."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[bool, int]] = Counter()
        self._pending: list[tuple[int, int]] = []

    def add(self, stage: int, *kinds: ActionKind) -> None:
        """Add forward, backward or input gradients of the stage's next micro-batch."""
        for kind in kinds:
            batch = self._next[kind is FORWARD, stage]
            self._next[kind is FORWARD, stage] += 1
            self.actions.append(Action(stage, kind, batch))
            if kind is INPUT:
                self._pending.append((stage, batch))

    def weights(self, of: int | None = None) -> bool:
        """Add the oldest pending weight gradients, of one stage or of any. Return whether there were any."""
        pending = next((pair for pair in self._pending if of in (None, pair[0])), None)
        if pending is not None:
            self._pending.remove(pending)
            self.actions.append(Action(pending[0], ActionKind.WEIGHT_GRADIENT, pending[1]))
        return pending is not None


def _gpipe(pipeline_rank: _PipelineRank) -> list[Action]:
    """All forwards, then all backwards [Huang 2019]."""
    order, (stage,) = _Order(), pipeline_rank.stages
    order.add(stage, *[FORWARD] * pipeline_rank.micro_batches, *[BACKWARD] * pipeline_rank.micro_batches)
    return order.actions


def _one_forward_one_backward(pipeline_rank: _PipelineRank) -> list[Action]:
    """Forwards until the last rank is reached, then alternating, then the remaining backwards [Narayanan 2021, 2.2]."""
    order, (stage,) = _Order(), pipeline_rank.stages
    ahead = pipeline_rank.ranks - 1 - pipeline_rank.rank
    order.add(stage, *[FORWARD] * ahead)
    order.add(stage, *[FORWARD, BACKWARD] * (pipeline_rank.micro_batches - ahead), *[BACKWARD] * ahead)
    return order.actions


def _looped_bfs(pipeline_rank: _PipelineRank) -> list[Action]:
    """All micro-batches of a stage before the next stage [Lamy-Poirier 2022]; backward in reverse order."""
    batches = range(pipeline_rank.micro_batches)
    forward = [Action(stage, FORWARD, batch) for stage in pipeline_rank.stages for batch in batches]
    return forward + [Action(stage, BACKWARD, batch) for stage in reversed(pipeline_rank.stages) for batch in reversed(batches)]


def _in_rounds(pipeline_rank: _PipelineRank, *, hop: int, backward: ActionKind) -> list[Action]:
    """1F1B that cycles through the stages of a rank, with a round of micro-batches each [Narayanan 2021, 2.2]; with backwards
    for inputs only, the weight gradients are deferred until the rank would wait [Qi 2023, ZB-H1].

    1. Only forwards until the first backward: the rounds of all stages but the last, and `hop` for each later rank.
    2. Alternating forwards and backwards, then only backwards.
    3. From the rank-th backward on, one weight gradient after each backward; the remaining ones at the end.
    """
    order, stages_per_rank = _Order(), len(pipeline_rank.stages)
    whole = stages_per_rank * pipeline_rank.micro_batches
    a_round = pipeline_rank.micro_batches // max(1, pipeline_rank.micro_batches // pipeline_rank.ranks)
    warm_up = min((stages_per_rank - 1) * a_round + hop * (pipeline_rank.ranks - 1 - pipeline_rank.rank), whole)
    for step in range(whole + warm_up):
        if step < whole:
            order.add(pipeline_rank.stages[step // a_round % stages_per_rank], FORWARD)
        if step >= warm_up:
            order.add(pipeline_rank.stages[stages_per_rank - 1 - (step - warm_up) // a_round % stages_per_rank], backward)
            if step - warm_up >= pipeline_rank.rank:
                order.weights()
    while order.weights():
        pass
    return order.actions


def _zbv(pipeline_rank: _PipelineRank) -> list[Action]:
    """Two stages per rank, folded into a V [Qi 2024]; built for at least 2 p - 1 micro-batches, of which excess is removed."""
    order, (first, second) = _Order(), pipeline_rank.stages
    batches, remaining_ranks = (
        max(2 * pipeline_rank.ranks - 1, pipeline_rank.micro_batches),
        pipeline_rank.ranks - pipeline_rank.rank,
    )
    order.add(first, *[FORWARD] * (2 * remaining_ranks - 1))
    for _ in range(pipeline_rank.rank):
        order.add(second, FORWARD)
        order.add(first, FORWARD)
    for _ in range(remaining_ranks):
        order.add(second, FORWARD, INPUT)
        order.weights(second)
    # The first stage's forwards lead the second's by the number of ranks; both end with all micro-batches.
    forward_first, forward_second = 2 * remaining_ranks - 1 + pipeline_rank.rank, pipeline_rank.rank + remaining_ranks
    while forward_second < forward_first or forward_first < batches:
        if forward_first < batches:
            order.add(first, FORWARD)
            forward_first += 1
        order.add(first, INPUT)
        order.weights(first)
        order.add(second, FORWARD, INPUT)
        order.weights(second)
        forward_second += 1
    for _ in range(pipeline_rank.rank):
        order.add(first, INPUT)
        order.add(second, INPUT)
    for _ in range(remaining_ranks):
        order.add(first, INPUT)
        order.weights(first)
    for stage in (second, first):
        while order.weights(stage):
            pass
    return [action for action in order.actions if action.micro_batch < pipeline_rank.micro_batches]


def _dualpipev(pipeline_rank: _PipelineRank) -> list[Action]:
    """Forward of one stage overlapping with backward of the other [DeepSeek 2025, DualPipe; folded as by Sea AI Lab].

    Overlapping actions are listed one after the other, forward first, as torch runs them unless an overlap is registered.
    """
    order, (first, second) = _Order(), pipeline_rank.stages
    later_ranks, rank_number = pipeline_rank.ranks - pipeline_rank.rank - 1, pipeline_rank.rank + 1
    order.add(first, *[FORWARD] * (2 * later_ranks))
    for _ in range(rank_number):
        order.add(first, FORWARD)
        order.add(second, FORWARD)
    for _ in range(later_ranks):
        order.add(second, INPUT)
        order.weights()
        order.add(second, FORWARD)
    for _ in range(pipeline_rank.micro_batches - 2 * pipeline_rank.ranks + rank_number):
        order.add(first, FORWARD)
        order.add(second, BACKWARD, FORWARD)
        order.add(first, BACKWARD)
    for _ in range(later_ranks):
        order.add(second, BACKWARD, FORWARD)
        order.add(first, BACKWARD)
    # In the second half of the remaining backwards, weight gradients are deferred; on odd ranks one backward earlier.
    split = 2 * (rank_number // 2) + (pipeline_rank.rank % 2 == 0)
    for backward in range(2 * rank_number):
        order.add((second, first)[backward % 2], INPUT if backward >= split else BACKWARD)
    for _ in range(later_ranks):
        order.weights()
        order.add(first, INPUT)
    while order.weights():
        pass
    return order.actions


_ORDERS: Mapping[str, Callable[[_PipelineRank], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": partial(_in_rounds, hop=2, backward=BACKWARD),
    "looped_bfs": _looped_bfs,
    "interleaved_zero_bubble": partial(_in_rounds, hop=1, backward=INPUT),
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
