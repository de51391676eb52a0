"""Tensor-parallel sums that overlap with products (`async_tensor_parallel`): what is hidden, and what more messages cost."""

from collections.abc import Sequence

import numpy as np

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.communication import collective_seconds, tensor_group
from search_spaces.communication import ROW_PARTS


def saved_seconds(
    cases: Cases, rates: Coefficients, message: Array, rows: Sequence[tuple[Array, Array]], weights: Sequence[Array]
) -> Array:
    """Seconds of a layer's tensor communication saved per micro-batch; negative where more messages cost more.

    1. A row product is split into p parts, whose sums are p messages; all but the last overlap with later parts, so at most
       (p - 1) / p of the product can hide communication.
    2. The sum of a column product's input gradient overlaps with the weights' gradients.
    3. Computation is slowed by overlapping communication.
    4. Under sequence parallelism this applies to half of the volume: gathers are not overlapped.

    Args:
        cases: the configurations.
        rates: coefficients.
        message: bytes of a micro-batch's hidden state.
        rows: for each row product its seconds, and how often it is computed.
        weights: seconds of each gradient of column weights.
    """
    layouts, group, behind = cases.layouts, tensor_group(cases), (ROW_PARTS - 1) / ROW_PARTS
    share = np.where(layouts.sequence_parallel > 0, 0.5, 1.0)
    volume = 2 * (group.ranks - 1) / group.ranks * message
    whole = collective_seconds(cases, group, volume, np.ones(1), rates) * share
    parted = collective_seconds(cases, group, volume, np.full(1, float(ROW_PARTS)), rates) * share
    saved = np.zeros(1)
    for seconds, times in rows:
        hidden = np.minimum(parted, seconds) * behind * (1 - rates.overlap_slowdown)
        saved = saved + times * (hidden - (parted - whole))
    for seconds in weights:
        saved = saved + np.minimum(whole, seconds) * (1 - rates.overlap_slowdown)
    return np.where((layouts.async_tensor_parallel > 0) & (layouts.tensor > 1), saved, 0.0)
