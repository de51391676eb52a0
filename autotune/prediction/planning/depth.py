"""Whether models with fewer layers rank configurations like the whole model, by the equations."""

import dataclasses
from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from autotune.errors import RequestError
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import Question
from search_spaces.models.model import ModelSpec
from search_spaces.space import SearchSpace
from search_spaces.training.fewer import at_full, fewer_layers
from search_spaces.trial_config import TrialConfig


def require_same_order(space: SearchSpace, most: int, engine: str) -> None:
    """Refuse fewer layers if they save nothing, or if their predicted ranking differs.

    Raises:
        RequestError: the model is a user's module, no configuration has two smaller depths, or the ranking does not carry over.
    """
    model = space.model
    field = "fidelity.most_layers"
    if not isinstance(model, ModelSpec):
        raise RequestError(field, "a module of one's own has no layers that could be left out", "leave it out")
    configs = [config for config in _drawn(space) if fewer_layers(config, model, most)]
    if not configs:
        problem = f"no two depths of at most {most} layers are fewer together than the {model.num_layers} of {model.name}"
        raise RequestError(field, problem, "give a third of its layers, or leave it out: it is shallow enough to be run whole")
    coefficient = correlation(space, configs, most, engine)
    if coefficient is not None and coefficient < 0.95:
        problem = (
            f"at {most} layers and fewer the predicted ranking is not the whole model's (rank correlation {coefficient:.2f})"
        )
        raise RequestError(field, problem, "give more, or leave it out")


def correlation(space: SearchSpace, configs: Sequence[TrialConfig], most: int, engine: str) -> float | None:
    """Spearman's correlation of predicted step seconds: whole model versus extrapolation from fewer layers.

    None if all predictions are equal.
    """
    model = space.model
    assert isinstance(model, ModelSpec)
    whole = _seconds(space, model, configs, engine)
    by_depths: dict[tuple[int, int], list[int]] = {}
    for index, config in enumerate(configs):
        depths = fewer_layers(config, model, most)
        assert depths is not None
        by_depths.setdefault(depths, []).append(index)
    extrapolated = np.empty(len(configs))
    for (first, second), places in by_depths.items():
        depth_configs = [configs[index] for index in places]
        few, more = (
            _seconds(space, dataclasses.replace(model, num_layers=depth), depth_configs, engine) for depth in (first, second)
        )
        extrapolated[places] = [at_full(model.num_layers, (first, second), *pair) for pair in zip(few, more, strict=True)]
    return spearman(extrapolated, np.array(whole))


def _drawn(space: SearchSpace) -> list[TrialConfig]:
    draw = Random(0)
    return list(dict.fromkeys(space.sample(draw) for _ in range(200)))


def _seconds(space: SearchSpace, model: ModelSpec, configs: Sequence[TrialConfig], engine: str) -> list[float]:
    work = space.workload
    question = Question(
        model=model, cluster=space.cluster, engine=engine, global_batch_size=work.global_batch_size,
        sequence_length=work.sequence_length, training_steps=work.training_steps,
        document_lengths=work.document_lengths,
    )  # fmt: skip
    return [estimate.step_seconds.mean for estimate in estimates(question, configs)]


Floats = NDArray[np.float64]


def spearman(first: Floats, second: Floats) -> float | None:
    """Rank correlation with mid-ranks for ties; None: one of the two does not vary."""
    if first.size < 2:
        return None
    first_ranks, second_ranks = mid_ranks(first), mid_ranks(second)
    first_ranks, second_ranks = first_ranks - first_ranks.mean(), second_ranks - second_ranks.mean()
    norm = float(np.sqrt((first_ranks @ first_ranks) * (second_ranks @ second_ranks)))
    return float(first_ranks @ second_ranks) / norm if norm else None


def mid_ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share their mean rank."""
    ordered, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    del ordered
    last = np.cumsum(counts)
    middles: Floats = last - (counts - 1) / 2
    return middles[inverse]
