"""Communication of the states: what data-parallel ranks reduce and gather in a step, and what of it nothing hides."""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import Group, collective_seconds, expert_data_group, replica_group, shard_group
from autotune.prediction.equations.compressed import (
    coding_seconds,
    frozen_share,
    gathered_share,
    has_near,
    near_group,
    sends_integers,
    sends_signs,
)
from autotune.prediction.equations.frozen import frozen_bytes, frozen_width
from autotune.prediction.equations.overlap_param_gather import exposed_seconds, gathers, gathers_late
from autotune.prediction.equations.parameters import (
    StageParameters,
    counted_elements,
    gathered_units,
    is_quantised,
    persistent_parameters,
)
from autotune.prediction.equations.pipeline import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rhythm:
    """How often a step sends, and in how many messages."""

    reductions: Array
    """Of every gradient."""
    gathers: Array
    """Of every parameter."""
    buckets: Array
    """Of the gradients."""
    pieces: Array
    """Messages of a gather: at stage 3 a layer each."""
    sent: Array
    """Messages of a reduction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seconds:
    """Of a step, were nothing hidden."""

    scatter: Array
    """Of gradients; at stage 0 the first half of their all-reduce."""
    gather: Array
    """Of parameters; at stage 0 the second half."""
    copies: Array
    """Sums over copies of the shards."""


def exposed_state_seconds(cases: Cases, rates: Coefficients, slowest: Array, split: Split, held: StageParameters) -> Array:
    """Seconds of a step: 2 P sent, (m + 1) P at stage 2, 3 m P at stage 3 [Rajbhandari 2020], less what is hidden.

    1. Reductions hide behind the backward of the micro-batch that they follow, gathers of stage 3 behind computation.
    2. Where a reduction waits for its bucket, the last one begins when backward has ended, and so does what sums it over copies
       of the shards. Of each layer's gather, what exceeds the prefetch bucket begins when the layer is used.
    3. Updated parameters hide where they are gathered late, beneath one forward. Signs of momenta are sent when backward has
       ended. Packing and unpacking of integers is not hidden.

    Args:
        cases: the configurations.
        rates: coefficients.
        slowest: seconds of a micro-batch on the slowest rank.
        split: layers of the pipeline's ranks.
        held: what the rank with the most layers holds.
    """
    layouts, often = cases.layouts, _rhythm(cases, split, held)
    at_three, signs = layouts.zero_stage == 3, sends_signs(cases)
    seconds = _Seconds(
        scatter=_scatter_seconds(cases, rates, held, often),
        gather=_gather_seconds(cases, rates, split, held, often),
        copies=_copies_seconds(cases, rates, held, often),
    )
    all_reduced = (layouts.zero_stage == 0) & ~signs
    reduction = np.where(all_reduced, seconds.scatter + seconds.gather, seconds.scatter) + seconds.copies
    last = np.where(_waits(cases), 1 / often.buckets, 0.0)
    ahead = np.where(_waits(cases), _ahead(cases, held), 1.0)
    late = exposed_seconds(cases, rates, seconds.gather, slowest, split.before_last, held)
    after = np.where(gathers_late(cases), late, seconds.gather)
    may_hide = reduction * (1 - last) + np.where(at_three, seconds.gather * ahead, 0.0)
    open_ = reduction * last + np.where(at_three, seconds.gather * (1 - ahead), np.where(all_reduced, 0.0, after))
    backward = slowest * rates.backward_ratio / (1 + rates.backward_ratio)
    beside = np.where(at_three, slowest * layouts.accumulation, backward * often.reductions)
    shown = _shown(cases, rates, np.where(signs, 0.0, may_hide), beside)
    coding = coding_seconds(cases, rates, held, often.reductions, np.where(at_three, often.gathers, 0.0))
    exposed: Array = shown + np.where(signs, seconds.scatter + seconds.gather, open_) + coding
    return exposed


def _ahead(cases: Cases, held: StageParameters) -> Array:
    """Share of what stage 3 gathers that is on its way before it is used: as much of a layer as fits the prefetch bucket, and
    beside the layer that runs.
    """
    layouts, counted = cases.layouts, counted_elements(cases)

    def share(unit: Array) -> Array:
        room = np.maximum(layouts.max_live / counted - unit, 0.0)
        return np.minimum(np.minimum(layouts.prefetch_bucket / counted, room) / np.maximum(unit, 1.0), 1.0)

    common, experts = gathered_units(cases)
    of_experts = _of_experts(cases, held) / np.maximum(held.trained, 1.0)
    found: Array = share(common) * (1 - of_experts) + share(experts) * of_experts
    return found


def _shown(cases: Cases, rates: Coefficients, may_hide: Array, beside: Array) -> Array:
    """What shows of communication that computation goes on beside; each slows the other down."""
    overlapped = np.maximum(may_hide - beside * (1 - rates.data_exposed), rates.data_exposed * may_hide)
    slowed = np.minimum(may_hide, beside) * rates.overlap_slowdown
    return np.where(cases.layouts.overlap > 0, np.minimum(overlapped + slowed, may_hide), may_hide)


def _rhythm(cases: Cases, split: Split, held: StageParameters) -> _Rhythm:
    layouts, m, signs = cases.layouts, cases.layouts.accumulation, sends_signs(cases)
    at_three = layouts.zero_stage == 3
    every_time = at_three | ((layouts.zero_stage == 2) & (layouts.defer == 0))
    buckets = np.maximum(np.ceil(held.trained / layouts.reduce_bucket), 1.0)
    # Below stage 3 parameters are gathered in buckets of their own, where these are the engine's.
    refills = np.where(_waits(cases), np.ceil(held.trained / layouts.allgather_bucket), buckets)
    below = np.where(layouts.zero_stage == 0, buckets, np.maximum(refills, 1.0))
    pieces = np.where(signs, 1.0, np.where(at_three, np.maximum(split.first, 1.0), below))
    return _Rhythm(
        reductions=np.where(every_time, m, 1.0),
        gathers=np.where(at_three, m * np.where(layouts.reshard > 0, 2.0, 1.0), 1.0),
        buckets=buckets,
        pieces=pieces,
        sent=np.where(_waits(cases) & ~signs, buckets, pieces),
    )


def _scatter_seconds(cases: Cases, rates: Coefficients, held: StageParameters, often: _Rhythm) -> Array:
    layouts, experts = cases.layouts, _of_experts(cases, held)
    by_another_way = sends_signs(cases) | sends_integers(cases) | (layouts.zero_stage == 0)
    volume = np.where(by_another_way, 1.0, cases.hardware.scatter_volume)
    width, count = layouts.reduce_bytes * often.reductions * volume, often.reductions * often.sent
    # Buckets are of what all ranks share out or of experts.
    apart = experts / np.maximum(held.trained, 1.0)
    common = _along(cases, rates, shard_group(cases), (held.trained - experts) * width, count * (1 - apart))
    return common + _along(cases, rates, expert_data_group(cases), experts * width, count * apart)


def _gather_seconds(cases: Cases, rates: Coefficients, split: Split, held: StageParameters, often: _Rhythm) -> Array:
    """With a second copy of the parameters near, one gather of each goes over all ranks, and others stay among neighbours."""
    layouts, most = cases.layouts, split.before_last
    pieces = np.where(gathers_late(cases), gathers(most), often.pieces)
    apart = np.where((layouts.zero_stage == 3) & is_quantised(cases), 2.0, 1.0)
    message, far = _gathered_bytes(cases, held, most), np.where(has_near(cases), 1.0, often.gathers)
    seconds = _along(cases, rates, shard_group(cases), message * far, far * pieces * apart)
    if np.any(has_near(cases)):
        again = often.gathers - far
        seconds = seconds + _along(cases, rates, near_group(cases), message * again, again * pieces * apart)
    width = np.where(layouts.zero_stage == 0, layouts.reduce_bytes, layouts.parameter_bytes * gathered_share(cases))
    of_experts = _of_experts(cases, held) * width * often.gathers
    return seconds + _along(cases, rates, expert_data_group(cases), of_experts, often.gathers * pieces)


def _gathered_bytes(cases: Cases, held: StageParameters, layers: Array) -> Array:
    """Of one gather of all that is shared out over data ranks, but experts on ranks of their own."""
    layouts, trained = cases.layouts, held.trained - _of_experts(cases, held)
    frozen = np.where(layouts.zero_stage == 3, frozen_bytes(cases, held) * frozen_share(cases), 0.0)
    whole = trained * layouts.parameter_bytes * gathered_share(cases) + frozen
    share = np.where(cases.shapes.frozen_bytes > 0, frozen_share(cases), gathered_share(cases))
    persistent = persistent_parameters(cases, layers) * frozen_width(cases) * share
    return np.where(layouts.zero_stage == 0, trained * layouts.reduce_bytes, np.maximum(whole - persistent, 0.0))


def _copies_seconds(cases: Cases, rates: Coefficients, held: StageParameters, often: _Rhythm) -> Array:
    """All-reduces over copies of the shards: once a step where each bucket's last reduction is waited for, else every time."""
    group, times = replica_group(cases), np.where(_waits(cases), 1.0, often.reductions)
    share = held.trained / cases.layouts.shard * cases.layouts.reduce_bytes
    volume = 2 * share * (group.ranks - 1) / np.maximum(group.ranks, 1.0)
    return collective_seconds(cases, group, volume * times, times * often.sent, rates)


def _of_experts(cases: Cases, held: StageParameters) -> Array:
    """Trained parameters of experts that are on different ranks."""
    return np.where(cases.layouts.expert > 1, held.expert_trained, 0.0)


def _waits(cases: Cases) -> Flags:
    """Whether a reduction begins when its whole bucket is there."""
    waits: Flags = cases.software.waits_for_bucket > 0
    return waits


def _along(cases: Cases, rates: Coefficients, group: Group, message: Array, count: Array) -> Array:
    """Seconds of gathers or scatters of so many bytes in all over a group; none where nothing is sent."""
    count = np.where(message > 0, count, 0.0)
    return collective_seconds(cases, group, message * (group.ranks - 1) / group.ranks, count, rates)
