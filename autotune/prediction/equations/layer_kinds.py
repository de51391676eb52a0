"""Models whose layers differ: with or without experts, with or without a window. Each rank counts its own layers."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, reduce

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, LayerKind, scalar
from autotune.prediction.equations.trained_shapes import keys_read
from search_spaces.models.model import ModelSpec
from search_spaces.training.windows import window_of

Kind = tuple[bool, bool]
"""Whether a layer has experts, and whether it has the model's window."""


@lru_cache(maxsize=256)
def kinds_of_layers(model: ModelSpec, sequence_length: int, windows: bool) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """The kinds that occur, if there are several, and the kind of each layer; `windows`: whether they are the model's own."""
    windows = windows and window_of(model).hides(sequence_length)
    layers = tuple((model.has_experts(place), windows and model.has_window(place)) for place in range(model.num_layers))
    kinds = tuple(sorted(set(layers)))
    return (kinds if len(kinds) > 1 else ()), layers


def layer_kinds(model: ModelSpec, sequence_length: int, windows: bool) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers with their shares; empty if all layers are alike."""
    kinds, layers = kinds_of_layers(model, sequence_length, windows)
    seen = keys_read(window_of(model), sequence_length)
    by_window = len({window for _, window in kinds}) > 1
    return tuple(
        LayerKind(
            share=scalar(layers.count(kind) / len(layers)),
            experts=float(kind[0]),
            keys=(seen if kind[1] else float(sequence_length)) if by_window else None,
        )
        for kind in kinds
    )


def of_kind(cases: Cases, kind: LayerKind) -> Cases:
    """The cases as if every layer were of this kind."""
    shapes = dataclasses.replace(cases.shapes, expert_share=scalar(kind.experts))
    if kind.keys is not None:
        shapes = dataclasses.replace(shapes, window=scalar(kind.keys))
    return dataclasses.replace(cases, shapes=shapes, kinds=())


def with_layers(cases: Cases, counts: Sequence[Array]) -> Cases:
    """The cases of a rank with so many layers of each kind: its means are those of its own layers."""
    if not cases.kinds or not counts:
        return cases
    whole = np.maximum(reduce(np.add, counts), 1.0)
    kinds = tuple(dataclasses.replace(kind, share=count / whole) for kind, count in zip(cases.kinds, counts, strict=True))
    shapes = dataclasses.replace(cases.shapes, expert_share=reduce(np.add, (kind.share * kind.experts for kind in kinds)))
    if kinds[0].keys is not None:
        shapes = dataclasses.replace(shapes, window=_mean_keys(kinds, shapes.sequence))
    return dataclasses.replace(cases, shapes=shapes, kinds=kinds)


def _mean_keys(kinds: Sequence[LayerKind], sequence: Array) -> Array:
    """The value of `Shapes.window` of layers of these shares: as `trained_shapes.mean_keys_read`."""
    hidden, mean = np.zeros(1), np.zeros(1)
    for kind in kinds:
        limited = kind.keys is not None and kind.keys < float(sequence[0])
        mean = mean + kind.share * (kind.keys if limited and kind.keys is not None else sequence / 2)
        hidden = hidden + (kind.share if limited else 0.0)
    return np.where(hidden > 0, mean, sequence)
