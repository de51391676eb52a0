"""Coefficients from a cluster's micro-benchmark: each row fits those that it tells of, by the predicting equations."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from autotune.prediction.cases.bench_cases import Predicted, predicted_rows
from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.rates import ON_A_PROCESSOR
from autotune.prediction.fitting.fitting import fitted
from autotune.prediction.fitting.spreads import spread_after
from search_spaces.cluster import ClusterSpec
from search_spaces.microbenchmark import Measured, Operation
from storage.records import CalibrationRecord

NOISE = 0.1
"""Standard deviation of the logarithm of a row's seconds over what the equations can say of it."""
QUARTILES = 1.35
"""Between the quartiles of a normal distribution lie so many standard deviations."""
LEAST_WORKSPACE_BYTES = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Coefficients that are fitted together."""

    names: tuple[str, ...]
    weights: dict[Operation, float]
    """Operation that tells of them -> what all its rows weigh together, however many they are."""


_PARTS = (
    _Part(
        names=(
            "matrix_efficiency", "rows_half", "width_half", "attention_efficiency", "backward_ratio", "traffic",
            "kernel_seconds",
        ),
        weights={
            Operation.LAYER: 10.0, Operation.HEAD: 4.0, Operation.PRODUCT: 8.0, Operation.PRODUCT_BACKWARD: 4.0,
            Operation.ATTENTION: 3.0, Operation.ATTENTION_BACKWARD: 2.0,
        },
    ),
    _Part(names=("update_efficiency",), weights={Operation.UPDATE: 4.0}),
    _Part(names=("host_update_efficiency",), weights={Operation.HOST_UPDATE: 4.0}),
)  # fmt: skip
_LINK_WEIGHTS = {
    Operation.ALL_REDUCE: 6.0, Operation.ALL_GATHER: 6.0, Operation.REDUCE_SCATTER: 6.0, Operation.ALL_TO_ALL: 2.0,
}  # fmt: skip
_LINKS = _Part(names=("link_efficiency", "link_seconds"), weights=_LINK_WEIGHTS)
_NETWORK = _Part(names=("network_efficiency", "network_seconds", "half_message"), weights=_LINK_WEIGHTS)
_HOPS = _Part(names=("hop_seconds",), weights={Operation.SEND: 6.0})


def coefficients_from_benchmark(
    record: CalibrationRecord, cluster: ClusterSpec, engine: str, before: Coefficients, precision: str | None = None
) -> Coefficients:
    """The most probable coefficients after what the cluster's ranks measured; what no row tells of stays as it was.

    1. Computation: products by shape, attention, whole layers and heads, forward and backward, all at once.
    2. Updates: by their largest rows, since small states fit in caches.
    3. Links: collectives inside nodes, then those across nodes with what links do known, then hops.
    4. The spread of times: what is known, and how far layers are off in this very fit.
    5. The bandwidth of files, where a folder was named: what the ranks of a node move together.
    6. Memory that is counted, not timed: the device's context and libraries' workspaces.

    Args:
        precision: whose rows tell of computation; None: the one that is trained in, fp32 on a CPU, else bf16.
    """
    precision = precision or default_precision(cluster)
    inside = [row for row in record.rows if row.group.ranks == row.group.in_node]
    across = [row for row in record.rows if row.group.ranks > row.group.in_node]
    computed = [row for row in inside if row.precision == precision]
    rates = _fit(_PARTS[0], computed, cluster, engine, before)
    for part in _PARTS[1:]:
        rates = _fit(part, _largest(inside, part), cluster, engine, rates)
    rates = _fit(_LINKS, inside, cluster, engine, rates)
    rates = _fit(_NETWORK, across, cluster, engine, rates)
    rates = _fit(_HOPS, inside, cluster, engine, rates)
    errors = _layer_errors(computed, cluster, engine, rates)
    rates = dataclasses.replace(rates, **_file_bandwidths(record.rows, cluster))
    spread = spread_after(before.time_spread, errors)
    # A quick measurement sees few shapes, and what it sees of them once: it makes no band narrower.
    spread = max(spread, before.time_spread) if record.quick else spread
    return dataclasses.replace(_counted(record, cluster, rates), time_spread=spread)


def default_precision(cluster: ClusterSpec) -> str:
    """What is trained in on such devices."""
    return "fp32" if cluster.device.kind == "cpu" else "bf16"


def _fit(part: _Part, rows: Sequence[Measured], cluster: ClusterSpec, engine: str, before: Coefficients) -> Coefficients:
    told = sorted((row for row in rows if row.operation in part.weights), key=lambda row: row.operation)
    if not told:
        return before
    families = [list(family) for _, family in groupby(told, key=lambda row: row.operation)]
    predictions: list[Predicted] = [predicted_rows(family, cluster, engine) for family in families]
    weights = np.concatenate([_weights(family, part.weights[family[0].operation]) for family in families])
    measured = np.array([row.seconds for row in told])

    def predicted(rates: Coefficients) -> Array:
        return np.concatenate([each(rates) for each in predictions])

    return fitted(part.names, before, predicted, measured, NOISE, weights)


def _layer_errors(rows: Sequence[Measured], cluster: ClusterSpec, engine: str, rates: Coefficients) -> Array:
    """log(measured / predicted) of layers: what most of a step is made of."""
    told = [row for row in rows if row.operation is Operation.LAYER]
    if not told:
        return np.empty(0)
    return np.log(np.array([row.seconds for row in told]) / predicted_rows(told, cluster, engine)(rates))


def _weights(family: Sequence[Measured], total: float) -> Array:
    """What each row weighs: less where its samples spread; `total` together where none does."""
    spreads = np.array([np.log(row.high / row.low) / QUARTILES for row in family])
    return total / len(family) * NOISE**2 / (NOISE**2 + spreads**2)


def _largest(rows: Sequence[Measured], part: _Part) -> list[Measured]:
    """Of each operation the rows of at least a quarter of its largest size."""
    mine = [row for row in rows if row.operation in part.weights]
    most = max((row.shape[0] for row in mine), default=0)
    return [row for row in mine if 4 * row.shape[0] >= most]


FILES = {Operation.FILE_READ: ("file_read_bandwidth", 1), Operation.FILE_UPDATE: ("file_update_bandwidth", 2)}
"""Operation -> the coefficient that it tells, and how often it moves each byte."""


def _file_bandwidths(rows: Sequence[Measured], cluster: ClusterSpec) -> dict[str, float]:
    """Coefficient -> bytes/s of a node, from the largest file of each operation."""
    ranks = min(cluster.devices_per_node, cluster.world_size)
    largest = {row.operation: row for row in sorted(rows, key=lambda row: row.shape[0]) if row.operation in FILES}
    return {FILES[operation][0]: ranks * FILES[operation][1] * row.shape[0] / row.seconds for operation, row in largest.items()}


def _counted(record: CalibrationRecord, cluster: ClusterSpec, rates: Coefficients) -> Coefficients:
    """Memory beside what the equations count. On a CPU the limit is held against the allocator, which gives what is asked."""
    if cluster.device.kind == "cpu":
        return dataclasses.replace(rates, **ON_A_PROCESSOR)
    known: dict[str, float] = {}
    if record.context_bytes:
        known["context_bytes"] = float(record.context_bytes)
    if record.workspace_bytes and record.workspace_bytes >= LEAST_WORKSPACE_BYTES:
        known["workspace_bytes"] = float(record.workspace_bytes)
    return dataclasses.replace(rates, **known)
