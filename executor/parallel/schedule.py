"""The order in which each rank of a pipeline computes a step: what torch's schedules work out, without torch and without ranks.

`Pipeline` runs torch's own; tests hold the two against each other. Nothing here imports torch: who draws a schedule need not
load it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from search_spaces.models.pipeline import stages_of_rank
from search_spaces.trial_config import TrialConfig


class ActionKind(StrEnum):
    """What a stage does with a micro-batch. The values are exported: never rename one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of inputs and of weights in one."""
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank computes."""

    stage: int
    kind: ActionKind
    micro_batch: int


FORWARD, BACKWARD, INPUT = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT


def actions_of(config: TrialConfig, micro_batches: int) -> list[list[Action]]:
    """What each rank of the pipeline computes in a step of so many micro-batches, in its order."""
    order = _ORDERS[config.pipeline_schedule]
    ranks = config.pipeline_parallel_size
    return [order(_Place(rank, ranks, stages_of_rank(config, rank), micro_batches)) for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank of the pipeline with its stages."""

    rank: int
    ranks: int
    stages: tuple[int, ...]
    micro_batches: int


class _Order:
    """Actions of a rank as they are added; the micro-batch of each is the stage's next."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[bool, int]] = Counter()
        self._pending: list[tuple[int, int]] = []

    def add(self, stage: int, *kinds: ActionKind) -> None:
        """Forward, backward or gradients of inputs of the stage's next micro-batch."""
        for kind in kinds:
            batch = self._next[kind is FORWARD, stage]
            self._next[kind is FORWARD, stage] += 1
            self.actions.append(Action(stage, kind, batch))
            if kind is INPUT:
                self._pending.append((stage, batch))

    def weights(self, of: int | None = None) -> bool:
        """The gradients of weights that have waited longest, of one stage or of any. Returns whether there were some."""
        found = next((pair for pair in self._pending if of in (None, pair[0])), None)
        if found is not None:
            self._pending.remove(found)
            self.actions.append(Action(found[0], ActionKind.WEIGHT_GRADIENT, found[1]))
        return found is not None


def _gpipe(place: _Place) -> list[Action]:
    """All forward, then all backward [Huang 2019]."""
    order, (stage,) = _Order(), place.stages
    order.add(stage, *[FORWARD] * place.micro_batches, *[BACKWARD] * place.micro_batches)
    return order.actions


def _one_forward_one_backward(place: _Place) -> list[Action]:
    """Forward until the last rank is reached, then in turn, then what is left of backward [Narayanan 2021, 2.2]."""
    order, (stage,) = _Order(), place.stages
    ahead = place.ranks - 1 - place.rank
    order.add(stage, *[FORWARD] * ahead)
    order.add(stage, *[FORWARD, BACKWARD] * (place.micro_batches - ahead), *[BACKWARD] * ahead)
    return order.actions


def _looped_bfs(place: _Place) -> list[Action]:
    """All micro-batches of a stage before the next one [Lamy-Poirier 2022]; backward takes the last one first."""
    batches = range(place.micro_batches)
    forward = [Action(stage, FORWARD, batch) for stage in place.stages for batch in batches]
    return forward + [Action(stage, BACKWARD, batch) for stage in reversed(place.stages) for batch in reversed(batches)]


def _interleaved(place: _Place) -> list[Action]:
    """1F1B over the stages of a rank in turn, a round of micro-batches each [Narayanan 2021, 2.2]."""
    return _in_rounds(place, hop=2, backward=BACKWARD)


def _zero_bubble(place: _Place) -> list[Action]:
    """The same with gradients of weights put off until the rank would wait [Qi 2023, ZB-H1]."""
    return _in_rounds(place, hop=1, backward=INPUT)


def _in_rounds(place: _Place, *, hop: int, backward: ActionKind) -> list[Action]:
    """Both interleaved schedules.

    1. Forward only, until the first backward comes: the earlier stages' rounds, and `hop` for each rank that follows.
    2. Forward and backward in turn; then backward only.
    3. Gradients of weights follow from the rank-th backward on, one for each; those that are left, at the end.
    """
    order, held = _Order(), len(place.stages)
    whole = held * place.micro_batches
    a_round = place.micro_batches // max(1, place.micro_batches // place.ranks)
    warm_up = min((held - 1) * a_round + hop * (place.ranks - 1 - place.rank), whole)
    for step in range(whole + warm_up):
        if step < whole:
            order.add(place.stages[step // a_round % held], FORWARD)
        if step >= warm_up:
            order.add(place.stages[held - 1 - (step - warm_up) // a_round % held], backward)
            if step - warm_up >= place.rank:
                order.weights()
    while order.weights():
        pass
    return order.actions


def _zbv(place: _Place) -> list[Action]:
    """Two stages a rank, folded into a V [Qi 2024]; written for 2 p - 1 micro-batches or more, others are left out."""
    order, (first, second) = _Order(), place.stages
    batches, rest = max(2 * place.ranks - 1, place.micro_batches), place.ranks - place.rank
    order.add(first, *[FORWARD] * (2 * rest - 1))
    for _ in range(place.rank):
        order.add(second, FORWARD)
        order.add(first, FORWARD)
    for _ in range(rest):
        order.add(second, FORWARD, INPUT)
        order.weights(second)
    # As many forwards of the first stage are ahead of the second's as there are ranks; both end with all micro-batches.
    forward_first, forward_second = 2 * rest - 1 + place.rank, place.rank + rest
    while forward_second < forward_first or forward_first < batches:
        if forward_first < batches:
            order.add(first, FORWARD)
            forward_first += 1
        order.add(first, INPUT)
        order.weights(first)
        order.add(second, FORWARD, INPUT)
        order.weights(second)
        forward_second += 1
    for _ in range(place.rank):
        order.add(first, INPUT)
        order.add(second, INPUT)
    for _ in range(rest):
        order.add(first, INPUT)
        order.weights(first)
    for stage in (second, first):
        while order.weights(stage):
            pass
    return [action for action in order.actions if action.micro_batch < place.micro_batches]


def _dualpipev(place: _Place) -> list[Action]:
    """Forward of one stage beside backward of the other [DeepSeek 2025, DualPipe; folded as by Sea AI Lab].

    What may overlap stands one after the other, forward first, as torch runs it where nothing else is registered.
    """
    order, (first, second) = _Order(), place.stages
    rest, own = place.ranks - place.rank - 1, place.rank + 1
    order.add(first, *[FORWARD] * (2 * rest))
    for _ in range(own):
        order.add(first, FORWARD)
        order.add(second, FORWARD)
    for _ in range(rest):
        order.add(second, INPUT)
        order.weights()
        order.add(second, FORWARD)
    for _ in range(place.micro_batches - 2 * place.ranks + own):
        order.add(first, FORWARD)
        order.add(second, BACKWARD, FORWARD)
        order.add(first, BACKWARD)
    for _ in range(rest):
        order.add(second, BACKWARD, FORWARD)
        order.add(first, BACKWARD)
    # In the second half of what is left, gradients of weights are put off; on odd ranks one backward earlier.
    split = 2 * (own // 2) + (place.rank % 2 == 0)
    for backward in range(2 * own):
        order.add((second, first)[backward % 2], INPUT if backward >= split else BACKWARD)
    for _ in range(rest):
        order.weights()
        order.add(first, INPUT)
    while order.weights():
        pass
    return order.actions


_ORDERS: Mapping[str, Callable[[_Place], list[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped_bfs,
    "interleaved_zero_bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
