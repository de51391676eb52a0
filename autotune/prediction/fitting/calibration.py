"""Coefficients from a cluster's micro-benchmark: each row fits the coefficients it depends on, by the prediction equations."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from autotune.prediction.cases.bench_cases import Predicted, predicted_rows
from autotune.prediction.equations.cases import Array
from autotune.prediction.equations.coefficients import ON_A_PROCESSOR, Coefficients
from autotune.prediction.fitting.trial_fit import fitted, spread_after, tail_after
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MeasuredRow, Operation, ranks_in_domain
from storage.records import CalibrationRecord

NOISE = 0.1
"""Standard deviation of the logarithm of a row's seconds that the equations cannot explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FittedPart:
    """Coefficients that are fitted together."""

    names: tuple[str, ...]
    weights: dict[Operation, float]
    """Informative operation -> total weight of its rows, independent of their number."""


_PARTS = (
    _FittedPart(
        names=(
            "matrix_efficiency", "rows_half", "width_half", "attention_efficiency", "backward_ratio", "traffic",
            "kernel_seconds",
        ),
        weights={
            Operation.LAYER: 10.0, Operation.HEAD: 4.0, Operation.PRODUCT: 8.0, Operation.PRODUCT_BACKWARD: 4.0,
            Operation.ATTENTION: 3.0, Operation.ATTENTION_BACKWARD: 2.0,
        },
    ),
    _FittedPart(names=("update_efficiency",), weights={Operation.UPDATE: 4.0}),
    _FittedPart(names=("host_update_efficiency",), weights={Operation.HOST_UPDATE: 4.0}),
)  # fmt: skip
_LINK_WEIGHTS = {
    Operation.ALL_REDUCE: 6.0, Operation.ALL_GATHER: 6.0, Operation.REDUCE_SCATTER: 6.0, Operation.ALL_TO_ALL: 2.0,
}  # fmt: skip
_LINKS = _FittedPart(names=("link_efficiency", "link_seconds", "chunk_seconds"), weights=_LINK_WEIGHTS)
_NETWORK = _FittedPart(names=("network_efficiency", "network_seconds", "half_message"), weights=_LINK_WEIGHTS)
_HOPS = _FittedPart(names=("hop_seconds",), weights={Operation.SEND: 6.0})


def coefficients_from_benchmark(
    record: CalibrationRecord, cluster: ClusterSpec, engine: str, before: Coefficients, precision: str | None = None
) -> Coefficients:
    """Return the most probable coefficients given the measurements of the cluster's ranks; others keep their value.

    1. Computation: products by shape, attention, whole layers and heads, forward and backward, all at once.
    2. Updates: by their largest rows, since small states fit in caches.
    3. Links: collectives inside link domains, then those across them with the fitted links, then hops.
    4. The spread of times: the prior, and the errors of layers in this fit.
    5. The bandwidth of files, if a folder was given: total over the ranks of a node.
    6. Memory that is counted, not timed: the device's context and libraries' workspaces.

    Args:
        precision: of the rows used for computation; None: the training precision, fp32 on a CPU, else bf16.
    """
    precision = precision or default_precision(cluster)
    inside = [row for row in record.rows if row.group.ranks == ranks_in_domain(row.group, cluster)]
    across = [row for row in record.rows if row.group.ranks > ranks_in_domain(row.group, cluster)]
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
    # A quick measurement sees few shapes, each only once: it does not narrow the band.
    spread = max(spread, before.time_spread) if record.quick else spread
    tail = before.time_tail if record.quick else tail_after(before.time_tail, errors)
    return dataclasses.replace(_counted(record, cluster, rates), time_spread=spread, time_tail=tail)


def default_precision(cluster: ClusterSpec) -> str:
    """The default training precision of the devices."""
    return "fp32" if cluster.device.kind == "cpu" else "bf16"


def _fit(
    part: _FittedPart, rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str, before: Coefficients
) -> Coefficients:
    used = sorted((row for row in rows if row.operation in part.weights), key=lambda row: row.operation)
    if not used:
        return before
    families = [list(family) for _, family in groupby(used, key=lambda row: row.operation)]
    predictions: list[Predicted] = [predicted_rows(family, cluster, engine) for family in families]
    weights = np.concatenate([_weights(family, part.weights[family[0].operation]) for family in families])
    measured = np.array([row.seconds for row in used])

    def predicted(rates: Coefficients) -> Array:
        return np.concatenate([prediction(rates) for prediction in predictions])

    return fitted(part.names, before, predicted, measured, NOISE, weights)


def _layer_errors(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str, rates: Coefficients) -> Array:
    """log(measured / predicted) of layers, which dominate a step."""
    layers = [row for row in rows if row.operation is Operation.LAYER]
    if not layers:
        return np.empty(0)
    return np.log(np.array([row.seconds for row in layers]) / predicted_rows(layers, cluster, engine)(rates))


def _weights(family: Sequence[MeasuredRow], total: float) -> Array:
    """The weight of each row: lower if its samples vary; the sum is `total` if none does."""
    # The quartiles of a normal distribution are 1.35 standard deviations apart.
    spreads = np.array([np.log(row.high / row.low) / 1.35 for row in family])
    return total / len(family) * NOISE**2 / (NOISE**2 + spreads**2)


def _largest(rows: Sequence[MeasuredRow], part: _FittedPart) -> list[MeasuredRow]:
    """For each operation the rows of at least a quarter of its largest size."""
    mine = [row for row in rows if row.operation in part.weights]
    most = max((row.shape[0] for row in mine), default=0)
    return [row for row in mine if 4 * row.shape[0] >= most]


FILES = {Operation.FILE_READ: ("file_read_bandwidth", 1), Operation.FILE_UPDATE: ("file_update_bandwidth", 2)}
"""Operation -> its coefficient, and how often it moves each byte."""


def _file_bandwidths(rows: Sequence[MeasuredRow], cluster: ClusterSpec) -> dict[str, float]:
    """Coefficient -> bytes/s of a node, from the largest file of each operation."""
    ranks = min(cluster.devices_per_node, cluster.world_size)
    largest = {row.operation: row for row in sorted(rows, key=lambda row: row.shape[0]) if row.operation in FILES}
    return {FILES[operation][0]: ranks * FILES[operation][1] * row.shape[0] / row.seconds for operation, row in largest.items()}


def _counted(record: CalibrationRecord, cluster: ClusterSpec, rates: Coefficients) -> Coefficients:
    """Add measured memory beyond the equations. On a CPU the limit applies to the allocator, which reserves nothing extra."""
    if cluster.device.kind == "cpu":
        return dataclasses.replace(rates, **ON_A_PROCESSOR)
    measured: dict[str, float] = {}
    if record.context_bytes:
        measured["context_bytes"] = float(record.context_bytes)
    if record.workspace_bytes and record.workspace_bytes >= 1e6:
        measured["workspace_bytes"] = float(record.workspace_bytes)
    return dataclasses.replace(rates, **measured)
