"""Pipelines with explicit layers: the contents of each rank, and its seconds per micro-batch.

Recomputed layers are counted, so that time and kept bytes are sums over a rank's layers: the integer program of
`stage_program` adds up exactly the predicted values.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np

from autotune.prediction.equations.cases import RECOMPUTE, Array, Cases, RankShare, RankTable, scalar
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.compute import MicroBatchSeconds, mean_micro_batch, micro_batch
from autotune.prediction.equations.hardware import devices_of_ranks
from autotune.prediction.equations.layer_shapes import kinds_of_layers, of_kind
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.models.model import ModelSpec
from search_spaces.models.pipeline import FOLDED_SCHEDULES, Stage, layout_text, parse_layout, split_layers, stages_of_rank
from search_spaces.trial_config import TrialConfig


class LayoutKey(NamedTuple):
    """What determines the contents of each rank."""

    ranks: int
    virtual_stages: int
    folded: bool
    """Whether the schedule folds."""
    text: str
    """The layout."""
    devices: tuple[int, ...]
    kinds: tuple[tuple[int, ...], ...]
    """For each stage, its layers of each of `Cases.kinds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """Micro-batch times by recomputation: according to the knobs, none, selective and full."""

    knobs: MicroBatchSeconds
    none: MicroBatchSeconds
    selective: MicroBatchSeconds
    full: MicroBatchSeconds
    kinds: "tuple[Paces, ...]" = ()
    """The same for each of `Cases.kinds`; the others are their means."""


def layout_key(
    config: TrialConfig, model: ModelSpec, cluster: ClusterSpec, sequence_length: int, windows: bool = True
) -> LayoutKey | None:
    """Return the key of a configuration; None: no explicit layers, and all layers and the devices of all ranks are alike.

    `windows`: whether attention windows are the model's own.
    """
    ranks, virtual = config.pipeline_parallel_size, config.virtual_stages
    kinds, layers = kinds_of_layers(model, sequence_length, windows)
    explicit = bool(config.pipeline_layout or cluster.groups or kinds)
    if ranks == 1 or not explicit or ranks * virtual > model.num_layers:
        return None
    text, stages = config.pipeline_layout, split_layers(model, config, sequence_length)
    if not text:
        text = layout_text(Stage(layers=len(stage_layers)) for stage_layers in stages)
    counts = tuple(
        tuple(layers[stage_layers.start : stage_layers.stop].count(kind) for kind in kinds) for stage_layers in stages
    )
    folded = config.pipeline_schedule in FOLDED_SCHEDULES
    return LayoutKey(ranks, virtual, folded, text, devices_of_ranks(config, cluster), counts)


def tabled(keys: Sequence[LayoutKey | None], every_rank: bool = False) -> tuple[Array, RankTable | None]:
    """The values of `Layouts.laid_out`, and the table that they refer to; `every_rank`: also ranks with the same contents."""
    places = {key: index + 1 for index, key in enumerate(dict.fromkeys(key for key in keys if key is not None))}
    laid_out = np.array([0 if key is None else places[key] for key in keys], dtype=np.float64)
    return laid_out, _table([*places], every_rank) if places else None


def _table(keys: Sequence[LayoutKey], every_rank: bool) -> RankTable:
    shares = [_shares(key, every_rank) for key in keys]
    rows_by_key = [rows for rows, _ in shares]
    most, width = max(len(rows) for rows in rows_by_key), len(rows_by_key[0][0])
    table = np.zeros((len(keys), most, width))
    for rows, target in zip(rows_by_key, table, strict=True):
        target[: len(rows)] = rows
    layouts = [parse_layout(key.text) for key in keys]
    recomputes = [any(stage.recomputed for stage in stages) for stages in layouts]
    offloads = [any(stage.offloads for stage in stages) for stages in layouts]
    pipeline_rank, alike, layers, selective, full, offloaded, first, last, device, *kinds = np.moveaxis(table, 2, 0)
    return RankTable(
        shares=RankShare(
            pipeline_rank=pipeline_rank, alike=alike, layers=layers, selective=selective, full=full, offloaded=offloaded,
            first=first, last=last, device=device, kinds=tuple(kinds),
        ),
        contenders=max(count for _, count in shares), recomputes=np.array(recomputes, dtype=np.float64),
        offloads=np.array(offloads, dtype=np.float64),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _shares(key: LayoutKey, every_rank: bool) -> tuple[tuple[tuple[float, ...], ...], int]:
    """The columns of the table for each rank with other contents than earlier ones, which need more memory; and how many of
    them can be the fullest or the slowest: those for which no earlier rank has at least as much of everything.
    """
    ranks, virtual, folded, text, devices, kinds = key
    stages = parse_layout(text)
    config = TrialConfig(
        pipeline_parallel_size=ranks, virtual_stages=virtual, pipeline_schedule="zbv" if folded else "interleaved_1f1b"
    )
    ranks_of: dict[tuple[float, ...], list[int]] = {}
    for rank in range(ranks):
        rank_stages = stages_of_rank(config, rank)
        counts = [sum(column) for column in zip(*(kinds[stage] for stage in rank_stages), strict=True)]
        share = _share([stages[stage] for stage in rank_stages], 0 in rank_stages, len(stages) - 1 in rank_stages)
        contents = (*share, float(devices[rank] if devices else 0), *counts, float(rank if every_rank else 0))
        ranks_of.setdefault(contents, []).append(rank)
    rows = [(float(alike[0]), float(len(alike)), *contents[:-1]) for contents, alike in ranks_of.items()]
    if every_rank:
        return tuple(rows), len(rows)
    leading = [row for index, row in enumerate(rows) if not any(_has_all(other, row) for other in rows[:index])]
    return (*leading, *(row for row in rows if row not in leading)), len(leading)


def _has_all(earlier: Sequence[float], later: Sequence[float]) -> bool:
    """Whether a rank has at least the layers of each kind and the tables of a later one, on the same device, without marks."""
    _, _, layers, *marks, first, last, device = earlier[:9]
    _, _, fewer, *later_marks, of_first, of_last, on_device = later[:9]
    counts = zip(earlier[9:], later[9:], strict=True)
    alike = not any(marks) and not any(later_marks) and device == on_device
    return alike and layers >= fewer and first >= of_first and last >= of_last and all(count >= less for count, less in counts)


def _share(stages: Sequence[Stage], first: bool, last: bool) -> list[float]:
    layers = sum(stage.layers for stage in stages)
    selective = sum(stage.recomputed for stage in stages if stage.recompute == "selective")
    full = sum(stage.recomputed for stage in stages if stage.recompute == "full")
    offloaded = sum(stage.layers for stage in stages if stage.offloads) / layers
    return [layers, selective, full, offloaded, first, last]


def shares_of(cases: Cases, contenders: bool = False) -> Iterable[RankShare]:
    """The contents of each rank of the table, or of those that can be the fullest or slowest; zeros for cases with fewer."""
    table, codes = cases.ranks, np.maximum(cases.layouts.laid_out.astype(np.int64) - 1, 0)
    assert table is not None
    fields = {item.name: getattr(table.shares, item.name) for item in dataclasses.fields(RankShare) if item.name != "kinds"}
    for index in range(table.contenders if contenders else table.shares.layers.shape[1]):
        kinds = tuple(counts[codes, index] for counts in table.shares.kinds)
        yield RankShare(kinds=kinds, **{name: values[codes, index] for name, values in fields.items()})


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
    return np.select([share.device == index for index in range(len(values))], list(values))


def paces_of(cases: Cases, rates: Coefficients, marked: bool = True) -> list[Paces]:
    """Micro-batch times for each recomputation policy, on each device; `marked`: whether any layout states a policy."""
    return [_paces(device_cases, rates, marked) for device_cases in on_devices(cases)]


def _paces(cases: Cases, rates: Coefficients, marked: bool) -> Paces:
    kinds = tuple(_paces(of_kind(cases, kind), rates, marked) for kind in cases.kinds)
    if kinds:
        means = {name: mean_micro_batch(cases, [getattr(kind, name) for kind in kinds]) for name in ("knobs", *RECOMPUTE)}
        return Paces(**means, kinds=kinds)
    knobs = micro_batch(cases, rates)
    policies = [micro_batch(recomputing(cases, policy), rates) if marked else knobs for policy in range(3)]
    return Paces(knobs=knobs, none=policies[0], selective=policies[1], full=policies[2])


def capacity_ratio(cases: Cases, share: RankShare) -> Array:
    """Memory of the rank's device, as a multiple of the smallest's."""
    if not cases.devices:
        return scalar(1)
    return on_own_device(share, [device.capacity / cases.hardware.capacity for device in cases.devices])


def recomputing(cases: Cases, policy: int) -> Cases:
    """The cases with every layer recomputed by a policy of `RECOMPUTE`."""
    return dataclasses.replace(
        cases, layouts=dataclasses.replace(cases.layouts, activation_checkpointing=scalar(policy), checkpoint_every_k=scalar(1))
    )


def rank_seconds(paces: Sequence[Paces], share: RankShare, overrides: Array) -> tuple[Array, Array]:
    """Seconds of a micro-batch on a rank: computation with the output projection, and communication of its layers."""
    seconds = [_seconds_on(pace, share, overrides) for pace in paces]
    return on_own_device(share, [compute for compute, _ in seconds]), on_own_device(share, [sent for _, sent in seconds])


def _seconds_on(paces: Paces, share: RankShare, overrides: Array) -> tuple[Array, Array]:

    def of_layer(policy: str, seconds: Callable[[MicroBatchSeconds], Array]) -> Array:
        """Of a mean layer of the rank."""
        if not (share.kinds and paces.kinds):
            return seconds(getattr(paces, policy))
        parts = [count * seconds(getattr(kind, policy)) for count, kind in zip(share.kinds, paces.kinds, strict=True)]
        return reduce(np.add, parts) / np.maximum(share.layers, 1.0)

    def summed(seconds: Callable[[MicroBatchSeconds], Array]) -> Array:
        by_knobs = share.layers * of_layer("knobs", seconds)
        if not np.any(overrides > 0):
            return by_knobs
        none, selective, full = (of_layer(policy, seconds) for policy in ("none", "selective", "full"))
        again = share.selective * (selective - none) + share.full * (full - none)
        return np.where(overrides > 0, share.layers * none + again, by_knobs)

    compute = summed(lambda batch: batch.layer) + share.last * paces.knobs.head
    return compute, summed(lambda batch: batch.layer_communication) + share.last * paces.knobs.head_communication


def offloading(cases: Cases, share: RankShare, overrides: Array) -> Cases:
    """The cases with the optimizer state that this rank offloads."""
    offloaded = np.where(overrides > 0, share.offloaded, cases.layouts.offload_optimizer)
    return dataclasses.replace(cases, layouts=dataclasses.replace(cases.layouts, offload_optimizer=offloaded))


def has_explicit_layers(cases: Cases) -> bool:
    """Whether the layers of any case are given explicitly."""
    return cases.ranks is not None and bool(np.any(cases.layouts.laid_out > 0))


def with_explicit_layers(
    cases: Cases, even_of: Callable[[Cases], dict[str, Array]], uneven_of: Callable[[Cases], dict[str, Array]]
) -> dict[str, Array]:
    """The values of `uneven_of` in cases with explicit layers, and of `even_of` in the others.

    `uneven_of` is called with only these cases if they are separate rows: its cost is proportional to the number of ranks.
    """
    codes = cases.layouts.laid_out
    if not has_explicit_layers(cases):
        return even_of(cases)
    if np.all(codes > 0):
        return uneven_of(cases)
    even = even_of(cases)
    if len(codes) == 1 or codes.size > len(codes):
        values = uneven_of(cases)
        return {name: np.where(codes > 0, values[name], even[name]) for name in even}
    rows = np.flatnonzero(codes.reshape(-1) > 0)
    values = uneven_of(cases.take(rows))
    return {name: _placed(even[name], values[name], rows, codes) for name in even}


def _placed(even: Array, uneven: Array, rows: "np.ndarray[tuple[int], np.dtype[np.int64]]", codes: Array) -> Array:
    beyond = np.broadcast_shapes(even.shape[1:], uneven.shape[1:], codes.shape[1:])
    whole: Array = np.broadcast_to(even, (len(codes), *beyond)).copy()
    whole[rows] = uneven
    return whole
