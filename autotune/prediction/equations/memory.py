"""Bytes that a rank holds at its peak, by tag and by pipeline stage."""

from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np

from autotune.prediction.equations import megatron, transformers
from autotune.prediction.equations.activations import (
    Activations,
    Recomputation,
    activations_of,
    grouped_matrix_bytes,
    kept_layer_bytes,
    layer_bytes,
)
from autotune.prediction.equations.cases import Array, Cases, Flags, RankShare
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import frozen_share, gathered_share, has_near, sends_integers
from autotune.prediction.equations.kernels import frozen_bytes, frozen_width, static_gradients
from autotune.prediction.equations.layer_shapes import with_layers
from autotune.prediction.equations.module_memory import module_bytes
from autotune.prediction.equations.overlap import buffer_bytes, gathers_late, refill_bytes
from autotune.prediction.equations.parameters import (
    StageParameters,
    counted_elements,
    divided,
    gathered_units,
    persistent_parameters,
    stage_parameters,
)
from autotune.prediction.equations.pipeline import in_flight, split_layers
from autotune.prediction.equations.software import Megatron, Transformers
from autotune.prediction.equations.state_traffic import host_elements, host_parameter_bytes
from autotune.prediction.equations.uneven import (
    capacity_ratio,
    layout_overrides,
    offloading,
    recomputing,
    shares_of,
    with_explicit_layers,
)
from search_spaces.lattice import checkpoint

TAGS = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "reserved", "context")
"""The engine's tags; `reserved`: bytes the allocator keeps beyond those used; `context`: bytes outside of the allocator."""
ADAM_BYTES = 8.0
"""The part of `Software.state_bytes` for two moments in fp32, which other optimizers do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the fullest rank."""

    by_tag: dict[str, Array]
    """The sum is the total; empty if tags were not asked for."""
    used: Array
    """Bytes used on the device, those outside of the allocator included."""
    host: Array
    """Bytes of host memory per rank."""
    stage: Array
    """Pipeline position of the fullest rank."""
    fragments: Array = field(default_factory=lambda: np.zeros(1))
    """Bytes that must be free besides those used, because free blocks are too small."""
    capacity_ratio: Array = field(default_factory=lambda: np.ones(1))
    """Memory of its device relative to the smallest, if devices differ: the fullest rank is the one closest to its capacity."""

    @property
    def total(self) -> Array:
        """Bytes on the device."""
        return reduce(np.add, self.by_tag.values())

    @property
    def needed(self) -> Array:
        """Bytes required to run: reserved bytes beyond those used are released when memory runs short.

        If devices differ, scaled to the smallest device: the bytes that fill it to the same degree.
        """
        return (self.used + self.fragments) / self.capacity_ratio

    @property
    def allocated(self) -> Array:
        """Peak bytes allocated by torch's allocator."""
        return self.used - self.by_tag["context"]

    def usable(self, cases: Cases) -> Array:
        """Usable bytes of the device, after fragmentation of the allocator."""
        return cases.hardware.capacity / cases.software.fragments

    def fits(self, cases: Cases) -> Flags:
        """Whether the mean prediction fits on the device."""
        return self.needed <= self.usable(cases)


def memory(cases: Cases, rates: Coefficients, tagged: bool = True) -> Memory:
    """For the fullest rank: of all ranks if layers are given explicitly, else of those that can be the fullest. `tagged`: by
    tag, too, which takes twice as long.
    """
    checkpoint()
    return _of_columns(
        with_explicit_layers(
            cases,
            lambda subset: _as_columns(_even_memory(subset, rates, tagged)),
            lambda subset: _as_columns(_fullest_share(subset, rates, tagged)),
        )
    )


def _even_memory(cases: Cases, rates: Coefficients, tagged: bool) -> Memory:
    """The fullest of the candidate ranks: the first, the first with an additional layer, and the last."""
    split, p = split_layers(cases), cases.layouts.pipeline
    unit = np.ones(1)
    single = np.where(p == 1, 1.0, 0.0)
    ranks = [(split.first, 0 * p, unit, np.maximum(single, _folded(cases)))]
    measured = cases.software.measured_rank
    if not (np.all(measured == 1) or np.all(p == 1)):
        inner = np.where(split.pipeline_rank > 0, split.pipeline_rank, 1.0)
        ranks.append((split.most, np.minimum(inner, p - 1), single, single))
        ranks.append((split.last, p - 1, single, np.maximum(single, 1 - _folded(cases))))
    fullest, *candidates = [rank_memory(cases, rates, *rank, tagged=tagged) for rank in ranks]
    for other in candidates:
        fuller = (other.used > fullest.used) & (measured == 0) & (p > 1)
        fullest = _where(fuller, other, fullest)
    return _where((measured == 2) & (p > 1), candidates[-1], fullest) if candidates and np.any(measured == 2) else fullest


def share_memory(
    cases: Cases, rates: Coefficients, share: RankShare, overrides: tuple[Array, Array], tagged: bool = True
) -> Memory:
    """Bytes by tag of a rank whose layers are given explicitly; `overrides`: the result of `uneven.layout_overrides`."""
    cases = with_layers(cases, share.kinds)
    again = _recomputation(cases, share, overrides[0]) if np.any(overrides[0] > 0) else None
    rank_cases = offloading(cases, share, overrides[1])
    usage = rank_memory(rank_cases, rates, share.layers, share.pipeline_rank, share.first, share.last, again, tagged)
    return replace(usage, capacity_ratio=capacity_ratio(cases, share))


def _recomputation(cases: Cases, share: RankShare, from_layout: Array) -> "Recomputation":
    """Of a rank's layers; `from_layout`: 1 if the layout states what is recomputed, else the configuration does."""
    whole = layer_bytes(cases)
    by_policy = [kept_layer_bytes(recomputing(cases, policy)) for policy in (1, 2)]
    saved = share.selective * (whole - by_policy[0]) + share.full * (whole - by_policy[1])
    most = np.maximum((share.selective > 0) * (whole - by_policy[0]), (share.full > 0) * (whole - by_policy[1]))
    configured = kept_layer_bytes(cases)
    knobs = np.where(cases.layouts.activation_checkpointing > 0, whole - configured, 0.0)
    layers = share.layers + share.last * cases.shapes.modules
    return Recomputation(
        kept_bytes=np.where(from_layout > 0, layers * whole - saved, layers * configured),
        working=np.where(from_layout > 0, most, knobs),
    )


def _fullest_share(cases: Cases, rates: Coefficients, tagged: bool) -> Memory:
    """The fullest rank; host memory is that of the rank with the most states there."""
    overrides = layout_overrides(cases)
    fullest, *candidates = (share_memory(cases, rates, share, overrides, tagged) for share in shares_of(cases, contenders=True))
    for other in candidates:
        host = np.maximum(other.host, fullest.host)
        fullest = replace(_where(other.needed > fullest.needed, other, fullest), host=host)
    return fullest


def _as_columns(usage: Memory) -> dict[str, Array]:
    return {**usage.by_tag, **{name: getattr(usage, name) for name in ("used", "host", "stage", "fragments", "capacity_ratio")}}


def _of_columns(columns: dict[str, Array]) -> Memory:
    rest = {name: values for name, values in columns.items() if name not in TAGS}
    return Memory(by_tag={tag: columns[tag] for tag in TAGS if tag in columns}, **rest)


def rank_memory(
    cases: Cases,
    rates: Coefficients,
    layers: Array,
    pipeline_rank: Array,
    first: Array,
    last: Array,
    again: Recomputation | None = None,
    tagged: bool = True,
) -> Memory:
    """Bytes of the rank at `pipeline_rank` of the pipeline with `layers` layers; `first`, `last`: 1 if it has the tables."""
    if cases.module is not None:
        return _module_memory(cases, rates, pipeline_rank)
    by_program = {
        "megatron": (cases.megatron.states > 0) & (cases.shapes.frozen_bytes == 0),
        "transformers": transformers.covers(cases),
    }
    for program, flags in by_program.items():
        if not np.any(flags):
            continue
        exact = _exact(cases, rates, program, layers, pipeline_rank, first, last)
        if np.all(flags):
            return exact
        others = replace(cases, megatron=Megatron()) if program == "megatron" else replace(cases, transformers=Transformers())
        return _where(flags, exact, rank_memory(others, rates, layers, pipeline_rank, first, last, again, tagged))
    parameter_counts = stage_parameters(cases, layers, first, last)
    layers = layers + last * cases.shapes.modules
    activations = activations_of(cases, rates, layers, pipeline_rank, first, last, again)
    peak = _peak(cases, rates, parameter_counts, layers, activations)
    # Static gradient buffers of graphs are permanent.
    static = static_gradients(cases, layers)
    allocated = peak.highest + (peak.states["parameters"] + peak.states["optimizer_state"] + static)
    tags: dict[str, Array] = {}
    if tagged:
        tags = _tags(peak, static)
        # Assume half of the worst-case fragmentation.
        reserved = np.maximum(rates.fragmentation, (1 + cases.software.fragments) / 2)
        tags["reserved"] = (reserved - 1) * allocated
        tags["context"] = rates.context_bytes + 0 * allocated
    shape = np.broadcast_shapes(pipeline_rank.shape, allocated.shape)
    return Memory(
        by_tag={tag: tags[tag] for tag in TAGS if tagged},
        used=allocated + rates.context_bytes,
        host=_host(cases, parameter_counts) + activations.host,
        stage=np.broadcast_to(pipeline_rank, shape),
    )


def _exact(
    cases: Cases, rates: Coefficients, program: str, layers: Array, pipeline_rank: Array, first: Array, last: Array
) -> Memory:
    """Of Megatron-LM or Transformers, to which nothing is fitted but the context and what the allocator adds."""
    context: Array | float
    if program == "megatron":
        terms, context = (
            megatron.allocated_bytes(cases, layers, in_flight(cases, pipeline_rank), first, last),
            rates.context_bytes,
        )
    else:
        terms, context = transformers.allocated_bytes(cases), transformers.context_bytes(cases)
    host, allocated = terms.pop("host"), reduce(np.add, (terms[tag] for tag in TAGS[:5]))
    kept = (np.maximum(rates.fragmentation, (1 + cases.software.fragments) / 2) - 1) * allocated
    terms["reserved"], fragments = np.maximum(terms.get("reserved", kept), kept), terms.pop("fragments", 0 * allocated)
    terms["context"] = context + 0 * allocated
    used = allocated + context
    by_tag, host, stage = {tag: terms[tag] for tag in TAGS}, host + 0 * used, pipeline_rank + 0 * used
    return Memory(by_tag=by_tag, used=used, host=host, stage=stage, fragments=fragments + 0 * used)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peak:
    """A rank's bytes at the fullest moment of a step."""

    states: dict[str, Array]
    """Parameters, gradients and optimizer state at their maximum."""
    highest: Array
    """Gradients, buffers and activations together."""
    buffers: Array
    """Those that layers gather and reduce, or that updated parameters are gathered into."""


def _tags(peak: _Peak, static: Array) -> dict[str, Array]:
    """Bytes by tag: states and buffers count at their maximum; activations are the rest of the peak.

    Forward's buffers do not coexist with all gradients: only as many are counted as fit below the peak.
    """
    without_gradients = peak.highest - peak.states["gradients"]
    buffers = np.minimum(peak.buffers, without_gradients)
    gradients = peak.states["gradients"] + static
    return {**peak.states, "gradients": gradients, "buffers": buffers, "activations": without_gradients - buffers}


def _peak(
    cases: Cases, rates: Coefficients, parameter_counts: StageParameters, layers: Array, activations: Activations
) -> _Peak:
    """The fullest of four moments: in forward, at the begin and the end of backward, after the update.

    0. The first micro-batch's forward has the buffers of updated parameters gathered during it.
    1. Backward begins with all activations, and with gradients if micro-batches preceded or gradients have permanent buffers.
    2. Backward ends with all gradients, the buckets being reduced, and the activations of the running layer.
    3. After the update gradients are freed, and updated parameters are gathered.
    """
    parts = (activations.begins, activations.ends, activations.forward)
    kept_activations, working, forward = (rates.activation_scale * part + rates.workspace_bytes for part in parts)
    states = _states(cases, parameter_counts, layers)
    gathered, reducing = _gathered(cases, parameter_counts), _reducing(cases, parameter_counts)
    before = np.maximum(cases.software.holds_gradients, np.where(cases.layouts.accumulation > 1, 1.0, 0.0))
    begins = _summed_gradients(cases, parameter_counts) * before + gathered + kept_activations
    # A table's gradient and bucket: as backward begins without logits, and as it ends without a layer's activations.
    table = _table_reducing(cases, parameter_counts)
    if np.any(table > 0):
        begins = np.maximum(begins, np.where(table > 0, states["gradients"] + gathered + table, -np.inf) + (forward - working))
    # Gradients of matrices in one shared tensor stay until the last of them has been copied.
    together = np.where(reducing > 0, grouped_matrix_bytes(cases), 0.0)
    ends = (
        states["gradients"]
        + gathered
        + np.maximum(reducing + together + working, np.where(table > 0, table + reducing * 2 / 3, 0.0))
    )
    late = buffer_bytes(cases, parameter_counts)
    refills = refill_bytes(cases, parameter_counts)
    highest = np.maximum(begins, np.maximum(ends, refills))
    if np.any(late > 0):
        # Two gathers are in flight before the last layer has run.
        before_last = forward - (forward - working) / np.maximum(layers, 1.0)
        runs = _summed_gradients(cases, parameter_counts) * cases.software.holds_gradients + late + before_last
        highest = np.maximum(highest, np.where(late > 0, runs, 0.0))
    return _Peak(states=states, highest=highest, buffers=np.maximum(gathered + reducing, np.maximum(late, refills)))


def shares(cases: Cases) -> tuple[Array, Array, Array]:
    """The divisors of parameters, gradients and optimizer state that all data-parallel ranks hold."""
    parameters, gradients, states = (np.where(flags, cases.layouts.shard, 1.0) for flags in sharded(cases))
    return parameters, gradients, states


def sharded(cases: Cases) -> tuple[Flags, Flags, Flags]:
    """Whether parameters, gradients and optimizer state are sharded: stages 3, 2 and 1 [Rajbhandari 2020].

    If buckets are sent as they fill, a step of one micro-batch keeps as few gradients at stage 1 as at stage 2.
    """
    stage = cases.layouts.zero_stage
    at_once = (cases.software.waits_for_bucket > 0) & (stage == 1) & (cases.layouts.accumulation <= 1)
    deferred = (cases.layouts.defer_gradient_reduction > 0) & (cases.layouts.accumulation > 1) & (stage == 2)
    return stage >= 3, ((stage >= 2) & ~deferred) | at_once, stage >= 1


def _folded(cases: Cases) -> Array:
    """1 if the first rank holds the last stage, too."""
    return np.where(cases.layouts.pipeline_schedule >= 5, 1.0, 0.0)


def _states(cases: Cases, parameter_counts: StageParameters, layers: Array) -> dict[str, Array]:
    layouts, software = cases.layouts, cases.software
    by_parameter, _, by_state = shares(cases)
    on_device = 1 - layouts.offload_parameters
    frozen = frozen_bytes(cases, parameter_counts) + software.quantised_extra * (
        parameter_counts.frozen - parameter_counts.frozen_tables
    )
    persistent = np.minimum(persistent_parameters(cases, layers), parameter_counts.trained + parameter_counts.frozen)
    whole = persistent * frozen_width(cases) * (1 - 1 / by_parameter)
    # Parameters in the type of their master are their own: unsharded ones, and at stage 3 each rank's share.
    own_master = (layouts.parameter_bytes >= layouts.master_bytes) & ((by_state == 1) | (layouts.zero_stage == 3))
    state = software.state_bytes - ADAM_BYTES + layouts.moment_bytes - np.where(own_master, 4.0, 4.0 - layouts.master_bytes)
    on_tables = parameter_counts.trained_tables / by_state * (layouts.other_moment_bytes - layouts.moment_bytes)
    of_parameters, _, of_states = sharded(cases)
    local_elements = divided(cases, parameter_counts, of_states)
    trained_bytes = divided(cases, parameter_counts, of_parameters) * layouts.parameter_bytes
    # The share in the parameters' type stays until gathered if the master is not entirely on the device.
    stays = gathers_late(cases) & (layouts.offload_optimizer > 0)
    standing = np.where(stays, local_elements * layouts.parameter_bytes, 0.0)
    return {
        "parameters": on_device * (trained_bytes + frozen / by_parameter + whole)
        + standing
        + _second_copy(cases, parameter_counts, persistent, frozen),
        "gradients": np.maximum(_summed_gradients(cases, parameter_counts), local_elements * software.gradient_bytes),
        "optimizer_state": (local_elements * state + on_tables) * (1 - layouts.offload_optimizer),
    }


def _second_copy(cases: Cases, parameter_counts: StageParameters, persistent: Array, frozen: Array) -> Array:
    """Bytes of the second copy of what is gathered again within a step, in the format sent."""
    across = np.where(cases.layouts.apart, parameter_counts.expert_trained, 0.0)  # experts have no second copy
    trained = (parameter_counts.trained - across) * cases.layouts.parameter_bytes * gathered_share(cases)
    gathered = trained + (frozen - persistent * frozen_width(cases)) * frozen_share(cases)
    return np.where(has_near(cases), gathered / np.maximum(cases.layouts.secondary_shard_size, 1.0), 0.0)


def _summed_gradients(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Bytes of gradients kept between micro-batches, in the type of accumulation."""
    layouts, gradient_bytes = cases.layouts, cases.software.gradient_bytes
    width = np.where(layouts.accumulation > 1, np.minimum(gradient_bytes, layouts.accumulation_bytes), gradient_bytes)
    return divided(cases, parameter_counts, sharded(cases)[1]) * width


def _host(cases: Cases, parameter_counts: StageParameters) -> Array:
    layouts = cases.layouts
    by_parameter, of_parameters, of_states = shares(cases)[0], sharded(cases)[0], sharded(cases)[2]
    state = cases.software.state_bytes - ADAM_BYTES + layouts.moment_bytes
    states = host_elements(cases, divided(cases, parameter_counts, of_states) * layouts.offload_optimizer) * state
    parameters = (
        divided(cases, parameter_counts, of_parameters) * layouts.parameter_bytes
        + frozen_bytes(cases, parameter_counts) / by_parameter
    )
    return states + host_parameter_bytes(cases, parameters * layouts.offload_parameters)


def _gathered(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Gathered bytes at stage 3: the running layer and the layers prefetched; experts separately if ranks divide them."""
    layouts, width = cases.layouts, frozen_width(cases)
    divides, (common, experts) = layouts.apart, gathered_units(cases)
    of_experts = np.where(divides, parameter_counts.expert_trained, 0.0)
    # In elements as wide as those of the layers' matrices.
    table = cases.shapes.vocabulary * cases.shapes.hidden / layouts.tensor * layouts.parameter_bytes / width
    whole = ((parameter_counts.trained - of_experts) * layouts.parameter_bytes + frozen_bytes(cases, parameter_counts)) / width
    live = _live(cases, common, table, whole) * (1 - 1 / layouts.shard)
    live = live + np.where(divides, _live(cases, experts, 0.0 * experts, of_experts), 0.0) * (1 - 1 / layouts.alike)
    live = np.where(cases.software.gathers_whole > 0, parameter_counts.frozen * cases.shapes.frozen_bytes, live * width)
    return np.where(layouts.zero_stage >= 3, live, 0.0)


def _live(cases: Cases, unit: Array, table: Array, whole: Array) -> Array:
    """Elements of `whole` that are gathered at once: the running unit, or the table, and the prefetched ones."""
    layouts, counted = cases.layouts, counted_elements(cases)
    ahead = np.minimum(layouts.prefetch_bucket_size / counted + unit, np.maximum(layouts.max_live_parameters / counted, unit))
    gathered = np.where(layouts.reshard_after_forward > 0, np.maximum(unit + ahead, table), whole)
    return np.minimum(gathered, whole)


def _reducing(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Bytes of buckets being filled and reduced, if gradients are sharded."""
    layouts = cases.layouts
    buckets = _filled(cases, parameter_counts, cases.software.buckets)
    bucket_bytes = buckets * np.maximum(layouts.reduce_bytes, layouts.parameter_bytes)
    # The bucket being filled is unpacked; those in flight, and their results, are packed.
    filling = _filled(cases, parameter_counts, np.ones(1))
    bucket_bytes = np.where(
        sends_integers(cases), filling * 4.0 + np.maximum(buckets - filling, 0.0) * 2 * layouts.reduce_bytes, bucket_bytes
    )
    bucket_bytes = np.where((layouts.data * layouts.context > 1) | (layouts.apart & (layouts.alike > 1)), bucket_bytes, 0.0)
    divides = sharded(cases)[1] & ((layouts.shard > 1) | (layouts.apart & (layouts.alike > 1)))
    return np.where((layouts.zero_stage >= 1) & divides, bucket_bytes, _cast_bucket_bytes(cases, parameter_counts))


def _filled(cases: Cases, parameter_counts: StageParameters, count: Array) -> Array:
    """Elements of `count` buckets of a rank's layers: a matrix larger than a bucket gets its own."""
    shapes, layouts = cases.shapes, cases.layouts
    of_experts = np.where(layouts.apart, parameter_counts.expert_trained, 0.0)
    common = parameter_counts.trained - of_experts
    whole = (cases.software.waits_for_bucket > 0) & (shapes.frozen_bytes == 0)
    mlp = np.where(whole, shapes.hidden * shapes.ffn / layouts.expert_tensor, 0.0)
    attention = np.where(whole, shapes.hidden * shapes.query / layouts.tensor, 0.0)
    bucket_size = np.maximum(layouts.reduce_bucket_size, np.where(layouts.apart, attention, np.maximum(mlp, attention)))
    # Buckets of experts are sent in between, so that one fewer exists.
    expert_elements = np.maximum(count - 1, 1.0) * np.maximum(layouts.reduce_bucket_size, mlp)
    filled: Array = np.minimum(count * bucket_size, common) + np.minimum(expert_elements, of_experts)
    return filled


def _table_reducing(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Bytes of a table's gradient and of the bucket that it is copied to, if buckets are sent as they fill."""
    shapes, layouts = cases.shapes, cases.layouts
    _, by_gradient, _ = shares(cases)
    sent = (cases.software.waits_for_bucket > 0) & (layouts.zero_stage >= 1) & (by_gradient > 1)
    table = np.minimum(parameter_counts.trained_tables, shapes.vocabulary * shapes.hidden / layouts.tensor)
    width = np.where(sends_integers(cases), 4.0, np.maximum(layouts.reduce_bytes, layouts.parameter_bytes))
    return np.where(sent, table * (width + layouts.parameter_bytes), 0.0)


def _cast_bucket_bytes(cases: Cases, parameter_counts: StageParameters) -> Array:
    """Bytes if whole gradients are summed in one type and shares reduced in another: the bucket that is cast, and the excess of
    the preceding buckets in flight over their sums. If gradients are not sharded, the cast ones are kept.
    """
    layouts = cases.layouts
    casts = (layouts.accumulation_bytes != layouts.reduce_bytes) & np.isfinite(layouts.accumulation_bytes)
    casts = casts & ~sends_integers(cases) & (layouts.accumulation > 1) & (layouts.zero_stage >= 1) & (layouts.shard > 1)
    bucket = np.minimum(layouts.reduce_bucket_size, parameter_counts.trained)
    before = np.minimum(
        parameter_counts.trained - bucket, layouts.reduce_bucket_size * np.where(layouts.overlap_comm > 0, 2.0, 0.0)
    )
    wider = np.maximum(layouts.reduce_bytes - np.minimum(layouts.accumulation_bytes, layouts.reduce_bytes), 0.0)
    # Sent and received data: if gradients stay whole, in addition to them.
    beside = bucket + np.where(layouts.zero_stage == 0, before, 0.0)
    packed = np.where(sends_integers(cases) & (layouts.data * layouts.context > 1), 2 * beside * layouts.reduce_bytes, 0.0)
    return np.where(casts, bucket * layouts.reduce_bytes + before * wider, packed)


def _module_memory(cases: Cases, rates: Coefficients, pipeline_rank: Array) -> Memory:
    """Of a user's module. Its trace counts every tensor, so that workspaces are those of a GPU's libraries only."""
    tags = module_bytes(cases, pipeline_rank)
    workspace = 0.0 if cases.described.copies else rates.workspace_bytes
    tags["activations"] = rates.activation_scale * tags["activations"] + workspace
    used = reduce(np.add, (tags[tag] for tag in TAGS[:5]))
    reserved = np.maximum(rates.fragmentation, (1 + cases.software.fragments) / 2)
    tags["reserved"], tags["context"] = (reserved - 1) * used, rates.context_bytes + 0 * used
    return Memory(
        by_tag={tag: tags[tag] for tag in TAGS}, used=used + tags["context"], host=tags["host"], stage=pipeline_rank + 0 * used
    )


def _where(chosen: Flags, first: Memory, second: Memory) -> Memory:
    columns = _as_columns(second)
    return _of_columns({name: np.where(chosen, values, columns[name]) for name, values in _as_columns(first).items()})
