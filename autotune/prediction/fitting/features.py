"""Features that distinguish runs and configurations: sizes and degrees in doublings, choices as steps."""

import operator
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from autotune.prediction.equations.cases import SCHEDULES, Array, Cases
from search_spaces.knob import Distance, Knob, Value
from search_spaces.knob_values import KNOBS
from search_spaces.trial_config import SCRIPT, TrialConfig, stable_hash

Numbers = Callable[[str, Callable[[Value], float]], Array]
"""Returns the values of a knob as numbers, given its name and the conversion of a value."""

SIZE = 6.0
"""Doublings of a bucket size equivalent to one doubling of a degree."""
CHOICE = 0.7
"""Distance, in doublings of a degree, for another schedule, kernel or rank order."""
DETAIL = 0.4
"""The same for knobs that change how, not what, is computed or sent."""
SIGNS = 6
"""Features of a user script's argument text: one sign each, so that any two texts differ in about half of them."""


def features(cases: Cases) -> Array:
    """Features that distinguish runs, one row per case: sizes and degrees in doublings, choices as steps."""
    layouts, shapes, software = cases.layouts, cases.shapes, cases.software
    world = layouts.world
    domains = np.maximum(world / cases.hardware.linked_devices, 1.0)
    piped, divided = layouts.pipeline > 1, layouts.tensor > 1
    across = piped & (domains > 1)
    columns = (
        np.log2(layouts.tensor),
        np.log2(layouts.pipeline),
        np.log2(layouts.data),
        np.log2(layouts.micro_batch_size),
        np.log2(layouts.accumulation),
        np.log2(layouts.context),
        np.log2(layouts.virtual_stages),
        np.log2(world),
        np.log2(shapes.hidden),
        np.log2(shapes.layers),
        np.log2(shapes.sequence) / 2,
        1.0 * (layouts.zero_stage > 0),
        1.0 * (layouts.zero_stage > 2),
        layouts.sequence_parallel,
        layouts.activation_checkpointing / layouts.checkpoint_every_k,
        2 * np.log2(software.elementwise),
        2 * np.log2(software.attention_speed),
        1.0 * (software.scores > 0),
        2.0 * piped,
        2.0 * divided,
        1.0 * (layouts.accumulation == 1),
        piped * np.log2(domains),
        2.0 * (across & divided) * np.log2(layouts.tensor),
        2.0 * (layouts.tensor > cases.hardware.linked_devices),
        1.0 * (across & (layouts.zero_stage == 0) & (layouts.data > 1)),
    )
    return np.stack([np.broadcast_to(column, len(cases)) for column in columns], axis=1)


def knob_features(cases: Cases, numbers: Numbers) -> Array:
    """(n, f) Features of n configurations: those of table residuals, and the knobs of the engine.

    f is constant, so that configurations of a space, of its history and of earlier jobs are comparable.

    Args:
        cases: the configurations.
        numbers: values of the knobs that no equation uses.
    """
    layouts, count = cases.layouts, len(cases)
    piped, at_three = layouts.pipeline > 1, layouts.zero_stage == 3
    columns = [
        CHOICE * (layouts.zero_stage == 2),
        2 * CHOICE * layouts.offload_optimizer * (1 + layouts.optimizer_in_files),
        2 * CHOICE * layouts.offload_parameters * (1 + layouts.parameters_in_files),
        2 * CHOICE * layouts.offload_activations,
        *(CHOICE * (piped & (layouts.pipeline_schedule == schedule)) for schedule in range(len(SCHEDULES))),
        CHOICE * (piped & (layouts.balanced > 0)),
        CHOICE * (piped & (layouts.laid_out > 0)),
        np.log2(layouts.checkpoint_every_k) / 2,
        DETAIL * layouts.overlap_comm,
        DETAIL * layouts.overlap_param_gather,
        DETAIL * layouts.async_tensor_parallel,
        DETAIL * layouts.shared_expert_overlap,
        DETAIL * layouts.defer_gradient_reduction,
        CHOICE * (at_three & (layouts.reshard_after_forward > 0)),
        _doublings(layouts.reduce_bucket_size),
        _doublings(layouts.prefetch_bucket_size) * at_three,
        _doublings(layouts.param_persistence_threshold) * at_three,
        _doublings(layouts.max_live_parameters) * at_three,
        _doublings(layouts.loss_chunk_size),
        np.log2(layouts.expert),
        np.log2(layouts.tensor / layouts.expert_tensor),
        np.log2(np.maximum(layouts.data * layouts.context / layouts.shard, 1.0)) * at_three,
        np.log2(layouts.parameter_bytes),
        DETAIL * np.log2(layouts.reduce_bytes * np.minimum(layouts.accumulation_bytes, 4) / 4),
        _doublings(layouts.allgather_bucket_size),
        CHOICE * (layouts.context_parallel_method * (layouts.context > 1)),
        *(_column(knob, numbers) for knob in KNOBS.values() if knob.distance is not None),
        layouts.first_weight + layouts.middle_weight,
        layouts.first_weight * layouts.drops,
        CHOICE * (cases.shapes.document > 0),
        CHOICE * (at_three & np.isfinite(layouts.gather_bytes)),
        np.log2(1 + layouts.secondary_shard_size) * at_three,
        *(CHOICE / SIGNS**0.5 * numbers(SCRIPT, partial(_sign, index)) for index in range(SIGNS)),
        *(CHOICE * numbers("optimizer", partial(operator.eq, str(name))) for name in KNOBS["optimizer"].choices),
    ]
    knob_columns = np.stack([np.broadcast_to(column, count) for column in columns], axis=1)
    return np.asarray(np.concatenate([features(cases), knob_columns], axis=1), dtype=np.float64)


def config_features(cases: Cases, configs: Sequence[TrialConfig]) -> Array:
    """The features of given configurations, in the order of the cases."""
    return knob_features(cases, numbers_of(configs))


def numbers_of(configs: Sequence[TrialConfig]) -> Numbers:
    """The numbers of given configurations."""
    return lambda name, meaning: np.array([meaning(getattr(config, name)) for config in configs], dtype=np.float64)


def _column(knob: Knob, numbers: Numbers) -> Array:
    """The feature of a knob whose declaration states how far its values are apart."""
    match knob.distance:
        case Distance.DETAIL:
            return DETAIL * numbers(knob.name, lambda value: float(value != 0))
        case Distance.CHOICE:
            return CHOICE * numbers(knob.name, partial(_place, knob.name))
        case _:
            return _doublings(numbers(knob.name, float))


def _sign(index: int, text: Value) -> float:
    """1 or -1, depending on the text; 0 if it is empty."""
    return 0.0 if text == "" else 2.0 * (int(stable_hash([index, text]), 16) % 2) - 1.0


def _doublings(elements: Array) -> Array:
    doublings: Array = np.log2(1 + np.maximum(elements, 0.0)) / SIZE
    return doublings


def _place(knob: str, value: Value) -> float:
    """The index of a choice among names."""
    names = [str(choice) for choice in KNOBS[knob].choices]
    return float(names.index(str(value))) if str(value) in names else 0.0
