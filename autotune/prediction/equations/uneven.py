"""Pipelines with explicit layers: the contents of each rank, and its seconds per micro-batch.

Recomputed layers are counted, so that time and kept bytes are sums over a rank's layers: the integer program of
`stage_program` adds up exactly the predicted values.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, RankTable, scalar
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.compute import MicroBatch, micro_batch
from autotune.prediction.equations.mixed import devices_of_ranks
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.model import ModelSpec
from search_spaces.models.pipeline import FOLDED_SCHEDULES, split_layers, stages_of_rank
from search_spaces.models.stage_layout import Stage, layout_text, parse_layout
from search_spaces.trial_config import TrialConfig

LayoutKey = tuple[int, int, bool, str, tuple[int, ...]]
"""Pipeline ranks, stages per rank, whether the schedule folds, layout, devices: determines the contents of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """The contents of one pipeline rank, in every case."""

    place: Array
    layers: Array
    selective: Array
    """Those of `layers` that the layout recomputes selectively."""
    full: Array
    """Those of `layers` that the layout recomputes in full."""
    offloaded: Array
    """Share of the optimizer state that the layout keeps in host memory."""
    first: Array
    """1 if it has the input table."""
    last: Array
    """1 if it has the output projection."""
    device: Array
    """Index of its device in `Cases.devices`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """Micro-batch times by recomputation: according to the knobs, none, selective and full."""

    knobs: MicroBatch
    none: MicroBatch
    selective: MicroBatch
    full: MicroBatch


def layout_key(config: TrialConfig, model: ModelSpec, cluster: ClusterSpec, sequence_length: int) -> LayoutKey | None:
    """Return the key of a configuration; None: no explicit layers, and every rank runs on the same device."""
    ranks, virtual = config.pipeline_parallel_size, config.virtual_stages
    if ranks == 1 or not (config.pipeline_layout or cluster.groups) or ranks * virtual > model.num_layers:
        return None
    folded, text = config.pipeline_schedule in FOLDED_SCHEDULES, config.pipeline_layout
    if not text:
        text = layout_text(Stage(layers=len(layers)) for layers in split_layers(model, config, sequence_length))
    return ranks, virtual, folded, text, devices_of_ranks(config, cluster)


def tabled(keys: Sequence[LayoutKey | None]) -> tuple[Array, RankTable | None]:
    """The values of `Layouts.laid_out`, and the table that they refer to."""
    places = {key: place + 1 for place, key in enumerate(dict.fromkeys(key for key in keys if key is not None))}
    laid_out = np.array([0 if key is None else places[key] for key in keys], dtype=np.float64)
    return laid_out, _table([*places]) if places else None


def _table(keys: Sequence[LayoutKey]) -> RankTable:
    most = max(ranks for ranks, *_ in keys)
    held = np.array([_shares(key, most) for key in keys], dtype=np.float64)
    layouts = [parse_layout(text) for _, _, _, text, _ in keys]
    recomputes = [any(stage.recomputed for stage in stages) for stages in layouts]
    offloads = [any(stage.offloads for stage in stages) for stages in layouts]
    return RankTable(
        layers=held[:, :, 0], selective=held[:, :, 1], full=held[:, :, 2], offloaded=held[:, :, 3], first=held[:, :, 4],
        last=held[:, :, 5], device=held[:, :, 6], recomputes=np.array(recomputes, dtype=np.float64),
        offloads=np.array(offloads, dtype=np.float64),
    )  # fmt: skip


def _shares(key: LayoutKey, most: int) -> list[list[float]]:
    """For each rank the columns of the table: layers to device; zeros for missing ranks."""
    ranks, virtual, folded, text, devices = key
    stages = parse_layout(text)
    config = TrialConfig(
        pipeline_parallel_size=ranks, virtual_stages=virtual, pipeline_schedule="zbv" if folded else "interleaved_1f1b"
    )
    held = [stages_of_rank(config, rank) for rank in range(ranks)]
    rows = [
        [*_share([stages[place] for place in own], 0 in own, len(stages) - 1 in own), float(devices[rank] if devices else 0)]
        for rank, own in enumerate(held)
    ]
    return rows + [[0.0] * 7] * (most - ranks)


def _share(stages: Sequence[Stage], first: bool, last: bool) -> list[float]:
    layers = sum(stage.layers for stage in stages)
    selective = sum(stage.recomputed for stage in stages if stage.recompute == "selective")
    full = sum(stage.recomputed for stage in stages if stage.recompute == "full")
    offloaded = sum(stage.layers for stage in stages if stage.offloads) / layers
    return [layers, selective, full, offloaded, first, last]


def shares_of(cases: Cases) -> Iterable[RankShare]:
    """The contents of each rank, in pipeline order; zeros for cases with fewer ranks."""
    table, codes = cases.ranks, np.maximum(cases.layouts.laid_out.astype(np.int64) - 1, 0)
    assert table is not None
    for place in range(table.layers.shape[1]):
        yield RankShare(
            place=scalar(place),
            layers=table.layers[codes, place],
            selective=table.selective[codes, place],
            full=table.full[codes, place],
            offloaded=table.offloaded[codes, place],
            first=table.first[codes, place],
            last=table.last[codes, place],
            device=table.device[codes, place],
        )


def layout_overrides(cases: Cases) -> tuple[Array, Array]:
    """Whether the layout itself states what is recomputed, and whether it states what is offloaded."""
    table, codes = cases.ranks, np.maximum(cases.layouts.laid_out.astype(np.int64) - 1, 0)
    assert table is not None
    return table.recomputes[codes], table.offloads[codes]


def on_devices(cases: Cases) -> list[Cases]:
    """The cases on each of the devices of pipeline ranks."""
    return [dataclasses.replace(cases, hardware=hardware) for hardware in cases.devices] or [cases]


def on_own_device(share: RankShare, values: Sequence[Array]) -> Array:
    """Select the value on the rank's own device."""
    if len(values) == 1:
        return values[0]
    return np.select([share.device == place for place in range(len(values))], list(values))


def paces_of(cases: Cases, rates: Coefficients) -> list[Paces]:
    """Micro-batch times for each recomputation policy, on each device."""
    return [
        Paces(
            knobs=micro_batch(own, rates),
            none=micro_batch(recomputing(own, 0), rates),
            selective=micro_batch(recomputing(own, 1), rates),
            full=micro_batch(recomputing(own, 2), rates),
        )
        for own in on_devices(cases)
    ]


def capacity_ratio(cases: Cases, share: RankShare) -> Array:
    """Memory of the rank's device, as a multiple of the smallest's."""
    if not cases.devices:
        return scalar(1)
    return on_own_device(share, [own.capacity / cases.hardware.capacity for own in cases.devices])


def recomputing(cases: Cases, policy: int) -> Cases:
    """The cases with every layer recomputed by a policy of `RECOMPUTE`."""
    return dataclasses.replace(
        cases, layouts=dataclasses.replace(cases.layouts, activation_checkpointing=scalar(policy), checkpoint_every_k=scalar(1))
    )


def rank_seconds(paces: Sequence[Paces], share: RankShare, overrides: Array) -> tuple[Array, Array]:
    """Seconds of a micro-batch on a rank: computation with the output projection, and communication of its layers."""
    seconds = [_seconds_on(own, share, overrides) for own in paces]
    return on_own_device(share, [compute for compute, _ in seconds]), on_own_device(share, [sent for _, sent in seconds])


def _seconds_on(paces: Paces, share: RankShare, overrides: Array) -> tuple[Array, Array]:

    def summed(seconds: Callable[[MicroBatch], Array]) -> Array:
        none = seconds(paces.none)
        again = share.selective * (seconds(paces.selective) - none) + share.full * (seconds(paces.full) - none)
        return np.where(overrides > 0, share.layers * none + again, share.layers * seconds(paces.knobs))

    compute = summed(lambda batch: batch.layer) + share.last * paces.knobs.head
    return compute, summed(lambda batch: batch.layer_communication) + share.last * paces.knobs.head_communication


def offloading(cases: Cases, share: RankShare, overrides: Array) -> Cases:
    """The cases with the optimizer state that this rank offloads."""
    offloaded = np.where(overrides > 0, share.offloaded, cases.layouts.offload_optimizer)
    return dataclasses.replace(cases, layouts=dataclasses.replace(cases.layouts, offload_optimizer=offloaded))


def has_explicit_layers(cases: Cases) -> bool:
    """Whether the layers of any case are given explicitly."""
    return cases.ranks is not None and bool(np.any(cases.layouts.laid_out > 0))


def with_explicit_layers(cases: Cases, even: dict[str, Array], own: Callable[[Cases], dict[str, Array]]) -> dict[str, Array]:
    """Replace the values of `even` by those of `own` in cases with explicit layers.

    `own` is called with only these cases if they are separate rows, since its cost is proportional to the number of ranks.
    """
    codes = cases.layouts.laid_out
    if len(codes) == 1 or codes.size > len(codes):
        values = own(cases)
        return {name: np.where(codes > 0, values[name], even[name]) for name in even}
    rows = np.flatnonzero(codes.reshape(-1) > 0)
    values = own(cases.take(rows))
    return {name: _placed(even[name], values[name], rows, codes) for name in even}


def _placed(even: Array, own: Array, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]", codes: Array) -> Array:
    beyond = np.broadcast_shapes(even.shape[1:], own.shape[1:], codes.shape[1:])
    whole: Array = np.broadcast_to(even, (len(codes), *beyond)).copy()
    whole[rows] = own
    return whole
