"""Compressed communication: messages are smaller, but compression takes time."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases, Flags
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import Group, group_of
from autotune.prediction.equations.parameters import StageParameters, is_quantised

PACK_BYTES, UNPACK_BYTES = 36.0, 22.0
"""Bytes moved per number to convert it to an integer, and back, by the engine's unfused operators."""


def sends_integers(cases: Cases) -> Flags:
    """Whether gradients are sent as 8-bit integers."""
    integers: Flags = (cases.layouts.reduce_bytes > 1) & (cases.layouts.reduce_bytes < 2)
    return integers


def sends_signs(cases: Cases) -> Flags:
    """Whether the update sends signs of momenta in place of gradients."""
    signs: Flags = cases.layouts.reduce_bytes < 1
    return signs


def gathers_integers(cases: Cases) -> Flags:
    """Whether stage 3 gathers parameters as 8-bit integers."""
    integers: Flags = (cases.layouts.zero_stage == 3) & np.isfinite(cases.layouts.gather_bytes)
    return integers


def gathered_share(cases: Cases) -> Array:
    """Bytes of a gathered parameter, as a share of its bytes in computation."""
    layouts = cases.layouts
    return np.where(gathers_integers(cases), np.minimum(layouts.gather_bytes / layouts.parameter_bytes, 1.0), 1.0)


def frozen_share(cases: Cases) -> Array:
    """The same for a frozen parameter: a quantised one is gathered as it is."""
    return np.where(is_quantised(cases), 1.0, gathered_share(cases))


def has_near(cases: Cases) -> Flags:
    """Whether parameters are gathered from a second copy, except for the first time in a step."""
    near: Flags = (cases.layouts.zero_stage == 3) & (cases.layouts.secondary_shard_size > 0)
    return near


def near_group(cases: Cases) -> Group:
    """The neighbours that share the second copy."""
    return group_of(cases, np.maximum(cases.layouts.secondary_shard_size, 1.0), cases.layouts.tensor)


def near_bytes(cases: Cases, gathered: Array) -> Array:
    """Bytes of a rank's part of the second copy, for `gathered` bytes."""
    return np.where(has_near(cases), gathered / np.maximum(cases.layouts.secondary_shard_size, 1.0), 0.0)


def coding_seconds(cases: Cases, rates: Coefficients, held: StageParameters, reductions: Array, gathers: Array) -> Array:
    """Seconds per step to convert numbers to integers and back; for signs, this is part of the update.

    Reduce: all gradients are packed, and as many unpacked on their owners; at stage 0 the shares once more. Gather: a rank
    packs its share and unpacks everything.
    """
    layouts = cases.layouts
    if not np.any(sends_integers(cases) | gathers_integers(cases)):
        return np.zeros(1)
    ranks = layouts.shard
    packed = np.where(layouts.zero_stage == 0, 1 + 1 / ranks, 1.0) * PACK_BYTES
    unpacked = np.where(layouts.zero_stage == 0, 2.0, 1.0) * UNPACK_BYTES
    reduced = np.where(sends_integers(cases), reductions * held.trained * (packed + unpacked), 0.0)
    elements = held.trained + np.where(is_quantised(cases), 0.0, held.frozen)
    # A second copy is already packed.
    packs = np.where(has_near(cases), np.minimum(gathers, 1.0), gathers)
    moved = elements * (packs * PACK_BYTES / ranks + gathers * UNPACK_BYTES)
    gathered = np.where(gathers_integers(cases), moved, 0.0)
    single = layouts.data * layouts.context == 1
    return np.where(single, 0.0, (reduced + gathered) / (cases.hardware.bandwidth * rates.update_efficiency))
