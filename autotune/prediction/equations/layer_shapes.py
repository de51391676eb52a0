"""Shapes of layers: those that configurations change (adapters, attention windows, multi-token prediction, packed documents),
and models whose layers differ (with or without experts, with or without a window), of which each rank counts its own layers.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache, reduce

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, LayerKind, Layouts, Shapes, scalar
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import adapted, adapts, layer_adapter_elements
from search_spaces.training.data_schedule import attended_tokens, rows_share
from search_spaces.training.expert_loads import busiest
from search_spaces.training.states import PARAMETER_BYTES
from search_spaces.training.windows import AttentionWindow, window_of, windowed
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig


def trained_shapes(shapes: Shapes, model: ModelSpec, sequence_length: int, configs: Sequence[TrialConfig]) -> Shapes:
    """The shapes with each configuration's adapters, window and modules for multi-token prediction."""
    shapes = windowed_shapes(adapted_shapes(shapes, model, configs), model, sequence_length, configs)
    if not any(config.mtp_layers for config in configs):
        return shapes
    return dataclasses.replace(shapes, modules=np.array([config.mtp_layers for config in configs], dtype=np.float64))


def adapted_shapes(shapes: Shapes, model: ModelSpec, configs: Sequence[TrialConfig]) -> Shapes:
    """Add each configuration's trained adapters to the shapes; unchanged if there are none."""
    if not any(adapts(config) for config in configs):
        return shapes
    # Fields of `Shapes` that describe trained and frozen parameters.
    fields = ("adapter", "adapter_divided", "frozen_bytes", "low_rank", "bottleneck", "prefix", "prompt")
    unchanged = tuple(float(getattr(shapes, name)[0]) for name in fields)
    rows = [_of(model, config) if adapts(config) else unchanged for config in configs]
    return dataclasses.replace(shapes, **dict(zip(fields, np.array(rows, dtype=np.float64).T, strict=True)))


def _of(model: ModelSpec, config: TrialConfig) -> tuple[float, ...]:
    """The values of FIELDS."""
    trained = adapted(model, config)
    whole, divided = layer_adapter_elements(trained)
    in_precision = config.frozen_dtype == "same"
    frozen_bytes = PARAMETER_BYTES[config.precision] if in_precision else trained.frozen_bytes
    low_rank = float(config.lora_rank > 0)
    return whole, divided, frozen_bytes, low_rank, config.adapter_size, config.prefix_length, config.prompt_length


def windowed_shapes(shapes: Shapes, model: ModelSpec, sequence_length: int, configs: Sequence[TrialConfig]) -> Shapes:
    """Add the window of each configuration to the shapes; unchanged without windows."""
    if not any(config.attention_window for config in configs):
        return shapes
    windows = [window_of(windowed(model, config)) for config in configs]
    read, copied = ([of(window, sequence_length) for window in windows] for of in (keys_read, keys_copied))
    return dataclasses.replace(shapes, window=np.array(read, dtype=np.float64), copied=np.array(copied, dtype=np.float64))


@lru_cache(maxsize=1024)
def keys_copied(window: AttentionWindow, sequence_length: int) -> float:
    """The value of `Shapes.copied`: of keys that are copied together with the global ones of a block, including these."""
    if not window.hides(sequence_length):
        return 0.0
    return sum(visit.keys for visit in window.visits(0, sequence_length) if visit.global_keys) / sequence_length


@lru_cache(maxsize=1024)
def keys_read(window: AttentionWindow, sequence_length: int) -> float:
    """The value of `Shapes.window`: by the visited blocks if the window hides anything, else the sequence. Within chunks the
    kernels skip what causality hides."""
    if not window.hides(sequence_length):
        return float(sequence_length)
    if window.chunked:
        return window.visible_pairs(sequence_length) / sequence_length
    return min(window.visited_pairs(sequence_length) / sequence_length, sequence_length - 1.0)


def mean_keys_read(model: ModelSpec, sequence_length: int) -> float:
    """The value of `Shapes.window` of a model, of whose layers only some may have the window: the mean over its layers.

    Layers without it attend to half of the sequence, causality counted, as `Shapes.window` does below the sequence.
    """
    window_keys = keys_read(window_of(model), sequence_length)
    if window_keys >= sequence_length or model.window_share == 1:
        return window_keys
    return model.window_share * window_keys + (1 - model.window_share) * sequence_length / 2


def loaded(layouts: Layouts, model: ModelSpec) -> Layouts:
    """Add the rows of the busiest rank that has a part of the experts; unchanged if no loads are stated."""
    if not model.expert_loads:
        return layouts
    degrees, places = np.unique(layouts.expert, return_inverse=True)
    rows, kept_rows = np.array([busiest(model, int(degree)) for degree in degrees], dtype=np.float64).T
    shaped = places.reshape(layouts.expert.shape)
    return dataclasses.replace(layouts, busiest_rows=rows[shaped], busiest_kept=kept_rows[shaped])


def documented(shapes: Shapes, model: ModelSpec, workload: Workload, configs: Sequence[TrialConfig]) -> Shapes:
    """Add the rows that each configuration makes of a workload's documents to the shapes; unchanged without documents."""
    if not workload.document_lengths:
        return shapes
    lengths, window = (workload.document_lengths, workload.sequence_length), window_of(model)
    looked = attended_tokens(*lengths)
    if window.chunked:
        looked += model.window_share * (attended_tokens(*lengths, window.tokens) - looked)
    packed = np.array([config.pack_sequences for config in configs], dtype=np.float64)
    useful = np.array([rows_share(config, workload) for config in configs], dtype=np.float64)
    return dataclasses.replace(shapes, document=packed * looked, useful=useful)


Kind = tuple[bool, bool]
"""Whether a layer has experts, and whether it has the model's window."""


@lru_cache(maxsize=256)
def kinds_of_layers(model: ModelSpec, sequence_length: int, windows: bool) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
    """The kinds that occur, if there are several, and the kind of each layer; `windows`: whether they are the model's own."""
    windows = windows and window_of(model).hides(sequence_length)
    layers = tuple((model.has_experts(layer), windows and model.has_window(layer)) for layer in range(model.num_layers))
    kinds = tuple(sorted(set(layers)))
    return (kinds if len(kinds) > 1 else ()), layers


def layer_kinds(model: ModelSpec, sequence_length: int, windows: bool) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers with their shares; empty if all layers are alike."""
    kinds, layers = kinds_of_layers(model, sequence_length, windows)
    window_keys = keys_read(window_of(model), sequence_length)
    by_window = len({window for _, window in kinds}) > 1
    return tuple(
        LayerKind(
            share=scalar(layers.count(kind) / len(layers)),
            experts=float(kind[0]),
            keys=(window_keys if kind[1] else float(sequence_length)) if by_window else None,
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
