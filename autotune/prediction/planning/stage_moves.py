"""Stages of models whose layers differ: moves of single layers from the answer of the integer program, by full predictions.

`stage_program` gives all layers the mean of their costs. Here each rank has its own layers: those without experts, or with a
window, are where the model has them.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Cases
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import seconds_of
from autotune.prediction.equations.uneven import layout_key, tabled
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.room import Room
from autotune.prediction.planning.stage_options import Menu
from search_spaces.models.pipeline import Stage, layout_text
from search_spaces.trial_config import TrialConfig

MOST_PAIRS = 1_000
"""With more pairs of stages, layers are moved between neighbours only."""
GAIN = 1e-6
"""Smallest relative gain of a move."""
Stages = tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """A configuration, all but its layout."""

    question: Question
    config: TrialConfig
    cases: Cases
    room: Room

    def costs(self, layouts: Sequence[Stages]) -> list[tuple[float, float]]:
        """For each layout, by how much its fullest rank exceeds its memory, as a share of it, and the seconds of a step."""
        model, cluster, length = self.question.shape, self.question.cluster, self.question.sequence_length
        written = [self.config.replace({"pipeline_layout": layout_text(stages)}) for stages in layouts]
        laid_out, ranks = tabled([layout_key(config, model, cluster, length) for config in written])
        own = dataclasses.replace(self.cases.layouts, laid_out=laid_out)
        cases = dataclasses.replace(self.cases, layouts=own, ranks=ranks)
        held = memory(cases, self.question.rates, tagged=False)
        beyond = np.maximum(np.maximum(held.needed / self.room.device, held.host / self.room.host) - 1, 0.0)
        seconds = np.broadcast_to(seconds_of(cases, self.question.rates), len(layouts))
        return list(zip(np.broadcast_to(beyond, len(layouts)).tolist(), seconds.tolist(), strict=True))


def improved(question: Question, config: TrialConfig, room: Room, menu: Menu, stages: Sequence[Stage]) -> Stages | None:
    """The stages after moves that each fit better or, if all fit, take less time: never worse than before. None: they still do
    not fit.

    1. Predict all moves of one layer from a stage to another, and of one more or fewer recomputed layer in a stage.
    2. Take the best, and repeat while it is better.

    Args:
        question: the model, the cluster and the workload.
        config: the rest of the configuration; it recomputes and offloads nothing that its layout does not.
        room: memory limits of a rank.
        menu: the possible choices.
        stages: where to start.
    """
    written = config.replace({"pipeline_layout": layout_text(stages)})
    cases = cases_of(question.model, question.cluster, question.workload, [written], question.engine)
    if not cases.kinds:
        return tuple(stages)
    pipeline = _Pipeline(question=question, config=config, cases=cases, room=room)
    best = tuple(stages)
    (least,) = pipeline.costs([best])
    while moves := list(_moves(best, menu)):
        costs = pipeline.costs(moves)
        place = min(range(len(moves)), key=costs.__getitem__)
        if costs[place] >= (least[0], least[1] * (1 - GAIN)):
            break  # the remaining moves gain nothing
        best, least = moves[place], costs[place]
    return None if least[0] > 0 else best


def _moves(stages: Stages, menu: Menu) -> Iterator[Stages]:
    several = len(stages) ** 2 <= MOST_PAIRS
    for source, own in enumerate(stages):
        for target in range(len(stages)) if several else (source - 1, source + 1):
            if own.layers > 1 and target != source and 0 <= target < len(stages):
                yield _with(stages, {source: _resized(own, -1), target: _resized(stages[target], 1)})
        for policy in menu.policies:
            if policy == "none" or (own.recomputed and own.recompute != policy):
                continue
            for count in (own.recomputed - 1, own.recomputed + 1):
                if 0 <= count <= own.layers:
                    yield _with(stages, {source: _recomputing(own, policy, count)})


def _with(stages: Stages, changed: dict[int, Stage]) -> Stages:
    return tuple(changed.get(place, stage) for place, stage in enumerate(stages))


def _resized(stage: Stage, more: int) -> Stage:
    """With so many more layers; a stage that recomputes all of them goes on doing so."""
    layers = stage.layers + more
    count = layers if stage.recomputed == stage.layers else min(stage.recomputed, layers)
    return _recomputing(dataclasses.replace(stage, layers=layers), stage.recompute, count)


def _recomputing(stage: Stage, policy: str, count: int) -> Stage:
    return dataclasses.replace(stage, recompute=policy if count else "none", recomputed=count)
