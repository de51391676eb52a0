"""Pipelines over arrays: layers per stage, micro-batches in flight, idle time of a schedule."""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import SCHEDULES, Array, Cases, Flags, Layouts

GPIPE, F1B1, INTERLEAVED, LOOPED, ZERO_BUBBLE, ZBV, DUALPIPEV = range(len(SCHEDULES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Layers of the relevant ranks: the first and the last of the pipeline, and the fullest between."""

    first: Array
    last: Array
    most: Array
    """Layers of the fullest rank except the last."""
    pipeline_rank: Array
    """Pipeline position of the first rank with `most` layers."""

    @property
    def before_last(self) -> Array:
        """The maximum of `first` and `most`: layers of the fullest rank except the last."""
        return np.maximum(self.first, self.most)


def head_in_layers(cases: Cases) -> Array:
    """FLOPs of the output projection as a multiple of a layer's, and of modules for multi-token prediction."""
    shapes = cases.shapes
    mlp = shapes.matrices * shapes.hidden * shapes.mlp_width
    layer = shapes.hidden * (2 * shapes.query + 2 * shapes.key_value) + mlp + 2 * shapes.query * shapes.sequence
    head = shapes.vocabulary * shapes.hidden
    return (head + shapes.modules * (head + layer + 2 * shapes.hidden**2)) / layer


def split_layers(cases: Cases) -> Split:
    """Compute the split of `search_spaces.models.pipeline.split_layers` for all cases at once.

    Each layer goes to the stage with the least load, ties to the later one. So the last stage, which also has the output
    projection of `w` layers, gets its x-th layer if the others' least load, floor((L - x) / (S - 1)), is w + x - 1 or
    more; the others share the rest as equally as possible.
    """
    layouts, layers = cases.layouts, cases.shapes.layers
    stages = layouts.pipeline * layouts.virtual_stages
    other_stages = np.maximum(stages - 1, 1)
    head = np.where(layouts.balanced > 0, head_in_layers(cases), 0.0)
    last = np.floor((layers + other_stages * (1 - head)) / (other_stages + 1)) + 1
    for _ in range(3):
        last = np.where(np.floor((layers - last) / other_stages) >= head + last - 1, last, last - 1)
    last = np.clip(last, 1, np.maximum(layers - other_stages, 1))
    other_layers = layers - last
    low, extra = np.floor(other_layers / other_stages), np.mod(other_layers, other_stages)
    return _of_ranks(cases, last, low, extra)


def _of_ranks(cases: Cases, last: Array, low: Array, extra: Array) -> Split:
    """Convert layers per stage to layers per rank: each rank holds `virtual` stages.

    The `extra` stages with an additional layer are those before the last one. Software that is `first_heavy` fills each stage
    until it has at least its share of the FLOPs, so the first ones have more. Looped schedules assign stage i to rank i modulo
    p, so ranks differ by one layer and the last has the last stage. Folded ones assign stages i and 2p - 1 - i to rank i, so
    the first also has the last stage: then `first` and `last` are the same rank.
    """
    layouts, layers = cases.layouts, cases.shapes.layers
    front, folded = cases.software.first_heavy > 0, layouts.pipeline_schedule >= ZBV
    p, v = np.maximum(layouts.pipeline, 1), layouts.virtual_stages
    single = p * v == 1
    filled = np.ceil((layers + np.where(layouts.balanced > 0, head_in_layers(cases), 0.0)) / p - 1e-9)
    most = v * low + np.ceil(extra / p)
    most = np.where(front & (v == 1), np.clip(filled, most, layers), most)
    first = np.where(front, most, v * low + np.floor((extra + 1) / p))
    end = (v - 1) * low + np.floor(extra / p) + last
    remainder = np.mod(extra, p)
    pipeline_rank = np.where(front | (remainder == 0), 0.0, np.maximum(p - 1 - remainder, 0.0))
    folded_layers = low + last
    inner = 2 * low + np.where(extra > 0, 1.0, 0.0) + np.where(extra >= p, 1.0, 0.0)
    fold = folded & (v > 1) & ~single
    return Split(
        first=np.select([single, fold], [layers + 0 * folded_layers, folded_layers], default=first),
        last=np.select([single, fold], [layers + 0 * folded_layers, folded_layers], default=end),
        most=np.select([single, fold], [layers + 0 * folded_layers, inner], default=np.maximum(most, first)),
        pipeline_rank=np.select(
            [single, fold],
            [0.0 * folded_layers, np.where(extra >= p, np.maximum(2 * p - 1 - extra, 1), 1.0)],
            default=pipeline_rank,
        ),
    )


def in_flight(cases: Cases, pipeline_rank: Array) -> Array:
    """Micro-batches whose activations are held at the peak, in units of a whole rank, at a pipeline position.

    1F1B min(m, p - i) [Narayanan 2021]; interleaved (pv + p - 2i - 1) / v, zero-bubble and V-shaped p, DualPipeV p + 1/2
    [counted on torch's schedules]; GPipe and LoopedBFS all m.
    """
    layouts = cases.layouts
    p, v, m = layouts.pipeline, layouts.virtual_stages, layouts.accumulation
    micro_batches = np.select(
        [
            layouts.pipeline_schedule == F1B1,
            layouts.pipeline_schedule == INTERLEAVED,
            (layouts.pipeline_schedule == ZERO_BUBBLE) | (layouts.pipeline_schedule == ZBV),
            layouts.pipeline_schedule == DUALPIPEV,
        ],
        [p - pipeline_rank, (p * v + p - 2 * pipeline_rank - 1) / v, p + 0 * pipeline_rank, p + 0.5 + 0 * pipeline_rank],
        default=m + 0 * p,
    )
    return np.where(p > 1, np.minimum(micro_batches, m), 1.0)


def losses_wait(layouts: Layouts) -> Flags:
    """Whether the last stage computes further losses before a backward (`search_spaces.models.pipeline.losses_wait`)."""
    waits: Flags = (layouts.pipeline > 1) & (layouts.pipeline_schedule != F1B1) & (layouts.pipeline_schedule != INTERLEAVED)
    return waits


def idle_micro_batches(cases: Cases) -> Array:
    """Idle time of the slowest rank per step, in units of one micro-batch's forward and backward on a whole rank.

    p - 1 for GPipe and 1F1B, divided by the stages per rank for interleaved ones [Narayanan 2021, 2.2]. Zero-bubble H1
    (p - 1)(tF + tB - tW): with input and weight gradients as long as forward, a third of it [Qi 2023]; ZBV a sixth. Frozen
    weights have no gradients to fill the bubble. Ranks that share cores lose less, since others compute on the idle cores.
    """
    layouts, frozen = cases.layouts, cases.shapes.frozen_bytes > 0
    p, v = layouts.pipeline, layouts.virtual_stages
    share = np.select(
        [
            (layouts.pipeline_schedule == INTERLEAVED)
            | (layouts.pipeline_schedule == LOOPED)
            | (frozen & (layouts.pipeline_schedule > LOOPED)),
            layouts.pipeline_schedule == ZERO_BUBBLE,
            (layouts.pipeline_schedule == ZBV) | (layouts.pipeline_schedule == DUALPIPEV),
        ],
        [1 / v, 1 / (3 * v), 1 / 6 + 0 * v],
        default=1.0 + 0 * v,
    )
    idle: Array = (p - 1) * share * cases.hardware.idle_cost
    return idle
