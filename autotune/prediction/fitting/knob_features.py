"""What tells the configurations of one job apart, as numbers: distances between them are how unlike their errors may be."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import SCHEDULES, Cases
from autotune.prediction.fitting.residual import features
from search_spaces.adapters import METHODS
from search_spaces.knobs import KNOBS
from search_spaces.trial_config import SCRIPT, TrialConfig, Value, stable_hash

Array = NDArray[np.float64]
Numbers = Callable[[str, Callable[[Value], float]], Array]
"""The values of a knob as numbers, by name and what a value means."""

SIZE = 6.0
"""Doublings of a bucket that count as much as one of a degree."""
CHOICE = 0.7
"""Steps of a degree that another schedule, kernel or place counts as."""
DETAIL = 0.4
"""The same of what changes how, not what, is computed or sent."""
SIGNS = 6
"""Features of what a user's script is told: a sign each, so that any two texts differ in about half of them."""


def knob_features(cases: Cases, numbers: Numbers) -> Array:
    """(n, f) Features of n configurations: what residuals of tables know, and the knobs of the engine.

    Of whichever configurations, f is the same: those of a space, of its history and of earlier jobs stand beside each other.

    Args:
        cases: the configurations.
        numbers: of the knobs that no equation looks at.
    """
    layouts, count = cases.layouts, len(cases)
    piped, at_three = layouts.pipeline > 1, layouts.zero_stage == 3
    columns = [
        CHOICE * (layouts.zero_stage == 2),
        2 * CHOICE * layouts.offload_optimizer * (1 + layouts.optimizer_in_files),
        2 * CHOICE * layouts.offload_parameters * (1 + layouts.parameters_in_files),
        2 * CHOICE * layouts.offload_activations,
        *(CHOICE * (piped & (layouts.schedule == place)) for place in range(len(SCHEDULES))),
        CHOICE * (piped & (layouts.balanced > 0)),
        CHOICE * (piped & (layouts.laid_out > 0)),
        np.log2(layouts.recompute_every) / 2,
        DETAIL * layouts.overlap,
        DETAIL * layouts.late_gather,
        DETAIL * layouts.async_tensor,
        DETAIL * layouts.defer,
        CHOICE * (at_three & (layouts.reshard > 0)),
        _doublings(layouts.reduce_bucket),
        _doublings(layouts.prefetch_bucket) * at_three,
        _doublings(layouts.persistence) * at_three,
        _doublings(layouts.max_live) * at_three,
        _doublings(layouts.loss_chunk),
        np.log2(layouts.expert),
        np.log2(np.maximum(layouts.data * layouts.context / layouts.shard, 1.0)) * at_three,
        np.log2(layouts.parameter_bytes),
        DETAIL * np.log2(layouts.reduce_bytes * layouts.accumulation_bytes / 4),
        _doublings(layouts.allgather_bucket),
        DETAIL * numbers("contiguous_gradients", float),
        DETAIL * numbers("fused_optimizer", float),
        CHOICE * numbers("rank_order", lambda value: _place("rank_order", value)),
        CHOICE * numbers("attention_backend", lambda value: _place("attention_backend", value)),
        DETAIL * numbers("expandable_segments", float),
        DETAIL * numbers("gc_interval", _whether),
        DETAIL * numbers("numa_binding", float),
        CHOICE * numbers("compile_blocks", float),
        CHOICE * numbers("fused_kernels", lambda value: _place("fused_kernels", value)),
        CHOICE * layouts.graphs,
        CHOICE * (layouts.context_method * (layouts.context > 1)),
        *(_doublings(numbers(name, float)) for name in METHODS),
        _doublings(numbers("attention_window", float)),
        _doublings(numbers("attention_global_tokens", float)),
        CHOICE * numbers("lora_targets", lambda value: _place("lora_targets", value)),
        CHOICE * numbers("frozen_dtype", lambda value: _place("frozen_dtype", value)),
        layouts.first_weight + layouts.middle_weight,
        layouts.first_weight * layouts.drops,
        CHOICE * (cases.shapes.document > 0),
        CHOICE * (at_three & np.isfinite(layouts.gather_bytes)),
        np.log2(1 + layouts.near) * at_three,
        _doublings(numbers("onebit_warmup_steps", float)),
        *_script_columns(numbers),
        *_optimizer_columns(numbers),
    ]
    own = np.stack([np.broadcast_to(column, count) for column in columns], axis=1)
    return np.asarray(np.concatenate([features(cases), own], axis=1), dtype=np.float64)


def config_features(cases: Cases, configs: Sequence[TrialConfig]) -> Array:
    """The features of configurations that are at hand, in the order of the cases."""
    return knob_features(cases, numbers_of(configs))


def numbers_of(configs: Sequence[TrialConfig]) -> Numbers:
    """The numbers of configurations that are at hand."""
    return lambda name, meaning: np.array([meaning(getattr(config, name)) for config in configs], dtype=np.float64)


def _script_columns(numbers: Numbers) -> list[Array]:
    return [CHOICE / SIGNS**0.5 * numbers(SCRIPT, partial(_sign, place)) for place in range(SIGNS)]


def _optimizer_columns(numbers: Numbers) -> list[Array]:
    """One for each optimizer."""
    names = [str(name) for name in KNOBS["optimizer"].choices]
    return [CHOICE * numbers("optimizer", partial(_is, name)) for name in names]


def _whether(value: Value) -> float:
    return float(value != 0)


def _is(name: str, value: Value) -> float:
    return float(value == name)


def _sign(place: int, text: Value) -> float:
    """1 or -1, by the text; 0 where it is empty."""
    return 0.0 if text == "" else 2.0 * (int(stable_hash([place, text]), 16) % 2) - 1.0


def _doublings(elements: Array) -> Array:
    told: Array = np.log2(1 + np.maximum(elements, 0.0)) / SIZE
    return told


def _place(knob: str, value: Value) -> float:
    """A number for a choice among names."""
    names = [str(choice) for choice in KNOBS[knob].choices]
    return float(names.index(str(value))) if str(value) in names else 0.0
