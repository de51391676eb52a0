"""The moments of a micro-batch of a user's module under checkpointing and offloading of activations."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.equations.cases import RECOMPUTE
from search_spaces.models.module_profile import Affine, Mark, Moment, Trace

NEAR_BLOCKS = 2
"""Blocks whose activations are on the device if they are offloaded."""


@lru_cache(maxsize=1024)
def curve_of(trace: Trace, policy: str, every: int, offloads: bool) -> NDArray[np.float64]:
    """(moments, 4): constant and per-sample part of the peak, and of the level."""
    moments = composed(trace, policy, every)
    curve = np.array([(*moment.peak, *moment.level) for moment in moments])
    return curve - _away(moments) if offloads else curve


def with_curve(moments: Sequence[Moment], curve: NDArray[np.float64]) -> list[Moment]:
    """The moments with the values of a curve."""
    return [
        dataclasses.replace(moment, peak=(float(row[0]), float(row[1])), level=(float(row[2]), float(row[3])))
        for moment, row in zip(moments, curve, strict=True)
    ]


def _away(moments: Sequence[Moment]) -> NDArray[np.float64]:
    """What is on the host at each moment if activations of all blocks but the last are offloaded."""
    kept, last = kept_by_block(moments), max((moment.index for moment in moments), default=0)
    away = np.zeros((len(moments), 4))
    held: set[int] = set()
    for place, moment in enumerate(moments):
        if moment.mark is Mark.FORWARD and moment.index >= NEAR_BLOCKS:
            held.add(moment.index - NEAR_BLOCKS)
        if moment.mark is Mark.BACKWARD:
            held -= {moment.index, moment.index - 1}
        sums = np.sum([kept[block] for block in held if block in kept and block < last] or [(0.0, 0.0)], axis=0)
        away[place] = (*sums, *sums)
    return away


def kept_by_block(moments: Sequence[Moment]) -> dict[int, Affine]:
    """What each block's forward leaves for backward."""
    found: dict[int, Affine] = {}
    begun: dict[int, Affine] = {}
    for moment in moments:
        if moment.mark is Mark.FORWARD:
            begun[moment.index] = moment.level
        elif moment.mark is Mark.LEFT and moment.index in begun:
            first = begun[moment.index]
            found[moment.index] = (moment.level[0] - first[0], moment.level[1] - first[1])
    return found


@lru_cache(maxsize=1024)
def composed(trace: Trace, policy: str, every: int) -> tuple[Moment, ...]:
    """The moments if the first of every `every` blocks is checkpointed.

    The traces of both policies are cut at their marks. What runs in a checkpointed block comes from the one, everything else
    from the other; levels continue where the last piece ended.
    """
    if policy == RECOMPUTE[0] or every == 1 or policy not in trace.moments:
        return trace.moments.get(policy, trace.moments[RECOMPUTE[0]])
    pieces = {name: _pieces(trace.moments[name]) for name in (RECOMPUTE[0], policy)}
    found: list[Moment] = []
    level: Affine = (0.0, 0.0)
    running = -1
    for place, (plain, other) in enumerate(zip(*pieces.values(), strict=True)):
        chosen = policy if running >= 0 and running % every == 0 else RECOMPUTE[0]
        piece = other if chosen == policy else plain
        start = (0.0, 0.0) if not place else pieces[chosen][place - 1][-1].level
        shift = (level[0] - start[0], level[1] - start[1])
        for moment in piece:
            found.append(
                Moment(mark=moment.mark, index=moment.index, peak=_sum(moment.peak, shift), level=_sum(moment.level, shift))
            )
        level, mark = found[-1].level, found[-1].mark
        running = found[-1].index if mark in (Mark.FORWARD, Mark.BACKWARD) else -1
    return tuple(found)


def _pieces(moments: Sequence[Moment]) -> list[list[Moment]]:
    """Cut after every mark but those of gradients."""
    ends = 0
    keys = []
    for moment in moments:
        keys.append(ends)
        ends += moment.mark is not Mark.GRADIENT
    return [[moment for _, moment in group] for _, group in groupby(zip(keys, moments, strict=True), key=lambda pair: pair[0])]


def _sum(one: Affine, other: Affine) -> Affine:
    return one[0] + other[0], one[1] + other[1]
