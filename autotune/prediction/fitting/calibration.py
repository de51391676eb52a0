"""Coefficients from a cluster's micro-benchmark: its rows as cases, and the coefficients that each row fits, by the prediction
equations.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from autotune.prediction.cases.config_cases import engine_software, layouts_of, shapes_of
from autotune.prediction.equations.cases import Array, Cases, scalar, stacked
from autotune.prediction.equations.coefficients import ON_A_PROCESSOR, Coefficients
from autotune.prediction.equations.communication import (
    CommunicationGroup,
    boundary_bandwidth,
    collective_seconds,
    exchange_seconds,
)
from autotune.prediction.equations.compute import _product, attention_forward, micro_batch
from autotune.prediction.equations.hardware import hardware_of
from autotune.prediction.equations.pipeline import split_layers
from autotune.prediction.equations.state_traffic import update_seconds
from autotune.prediction.equations.step import local_parameters, offload_seconds
from autotune.prediction.fitting.trial_fit import fitted, left_after, spread_after, tail_after
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MeasuredRow, Operation, layer_model, network_sharing, ranks_in_domain
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig
from storage.records import CalibrationRecord

Predicted = Callable[[Coefficients], Array]
"""Seconds of each row with these coefficients."""


def predicted_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    """The seconds that the equations predict for rows of one operation."""
    build = _BUILDERS[rows[0].operation]
    return build(rows, cluster, engine)


def link_volume(row: MeasuredRow) -> float:
    """Bytes that pass through a rank's link."""
    share = (row.group.ranks - 1) / row.group.ranks
    # Operation -> volume through a rank's link, as a multiple of (n - 1) / n of the message.
    volumes = {
        Operation.ALL_REDUCE: 2.0, Operation.ALL_GATHER: 1.0, Operation.REDUCE_SCATTER: 1.0, Operation.ALL_TO_ALL: 1.0,
    }  # fmt: skip
    return row.shape[0] * volumes[row.operation] * share if row.operation in volumes else float(row.shape[0])


def _product_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    cases = stacked([_case(layer_model(1, 8, 1, 8), 1, cluster, engine, row.precision) for row in rows])
    outward, inner, outer = (_column(rows, dimension) for dimension in range(3))
    backward = np.array([row.operation is Operation.PRODUCT_BACKWARD for row in rows])
    return lambda rates: _product(cases, rates, outward, inner, outer) * np.where(backward, rates.backward_ratio, 1.0)


def _attention_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    def one(row: MeasuredRow) -> Cases:
        samples, tokens, heads, width = row.shape
        return _case(layer_model(tokens, heads * width, heads, 8), samples, cluster, engine, row.precision)

    cases = stacked([one(row) for row in rows])
    backward = np.array([row.operation is Operation.ATTENTION_BACKWARD for row in rows])
    return lambda rates: attention_forward(cases, rates) * np.where(backward, rates.backward_ratio, 1.0)


def _layer_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    def one(row: MeasuredRow) -> Cases:
        samples, tokens, hidden, heads, ffn = row.shape
        return _case(layer_model(tokens, hidden, heads, ffn), samples, cluster, engine, row.precision)

    cases = stacked([one(row) for row in rows])
    return lambda rates: micro_batch(cases, rates).layer


def _head_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    def one(row: MeasuredRow) -> Cases:
        samples, tokens, hidden, vocabulary = row.shape
        return _case(layer_model(tokens, hidden, 1, hidden, vocabulary), samples, cluster, engine, row.precision)

    cases = stacked([one(row) for row in rows])
    return lambda rates: micro_batch(cases, rates).head


def _update_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    cases = stacked([_states(row.shape[0], cluster, engine) for row in rows])
    split = split_layers(cases)
    return lambda rates: update_seconds(cases, rates, local_parameters(cases, split), split.before_last)


def _host_update_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    """The update only: with an infinite link, transfers take no time."""
    cases = stacked([_states(row.shape[0], cluster, engine) for row in rows])
    cases = dataclasses.replace(
        cases,
        hardware=dataclasses.replace(cases.hardware, host_link=scalar(np.inf)),
        layouts=dataclasses.replace(cases.layouts, offload_optimizer=scalar(1.0), data=scalar(cluster.world_size)),
    )
    split = split_layers(cases)
    return lambda rates: offload_seconds(cases, rates, np.zeros(1), split, local_parameters(cases, split))


def _collective_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    cases = _case(layer_model(1, 8, 1, 8), 1, cluster, engine, "fp32")
    scatters = np.array([row.operation is Operation.REDUCE_SCATTER for row in rows])
    volume = np.array([link_volume(row) for row in rows]) * np.where(scatters, cases.hardware.scatter_volume, 1.0)
    group = CommunicationGroup(
        ranks=np.array([float(row.group.ranks) for row in rows]),
        in_domain=np.array([float(ranks_in_domain(row.group, cluster)) for row in rows]),
        sharing=np.array([network_sharing(row.group, cluster) for row in rows]),
    )
    exchanges, once = np.array([row.operation is Operation.ALL_TO_ALL for row in rows]), np.ones(len(rows))
    return lambda rates: np.where(
        exchanges, exchange_seconds(cases, group, volume, once, rates), collective_seconds(cases, group, volume, once, rates)
    )


def _send_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    """Like a boundary between two pipeline stages, inside a link domain."""
    cases = _case(layer_model(1, 8, 1, 8), 1, cluster, engine, "fp32")
    message = _column(rows, 0)
    return lambda rates: message / boundary_bandwidth(cases, rates) + rates.hop_seconds


_BUILDERS: dict[Operation, Callable[[Sequence[MeasuredRow], ClusterSpec, str], Predicted]] = {
    Operation.PRODUCT: _product_rows,
    Operation.PRODUCT_BACKWARD: _product_rows,
    Operation.ATTENTION: _attention_rows,
    Operation.ATTENTION_BACKWARD: _attention_rows,
    Operation.LAYER: _layer_rows,
    Operation.HEAD: _head_rows,
    Operation.UPDATE: _update_rows,
    Operation.HOST_UPDATE: _host_update_rows,
    Operation.ALL_REDUCE: _collective_rows,
    Operation.ALL_GATHER: _collective_rows,
    Operation.REDUCE_SCATTER: _collective_rows,
    Operation.ALL_TO_ALL: _collective_rows,
    Operation.SEND: _send_rows,
}


def _case(model: ModelSpec, samples: int, cluster: ClusterSpec, engine: str, precision: str) -> Cases:
    """A micro-batch of `samples` samples of the model on one rank of the cluster."""
    config = TrialConfig(micro_batch_size=samples, precision=precision)
    return Cases(
        shapes=shapes_of(model, model.sequence_length),
        hardware=hardware_of(cluster, precision),
        layouts=layouts_of([config], samples, 1),
        software=engine_software(model, engine, {config.attention_backend}, cluster.device.kind),
    )


def _states(elements: int, cluster: ClusterSpec, engine: str) -> Cases:
    """A model that consists only of a table of `elements` parameters: how the equations represent an update of that size."""
    cases = _case(layer_model(1, 8, 1, 8), 1, cluster, engine, "fp32")
    shapes = dataclasses.replace(
        cases.shapes, layers=scalar(0), hidden=scalar(1), vocabulary=scalar(elements), tied=scalar(1), positions=scalar(0)
    )
    return dataclasses.replace(cases, shapes=shapes)


def _column(rows: Sequence[MeasuredRow], dimension: int) -> Array:
    return np.array([float(row.shape[dimension]) for row in rows])


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
    link_weights = {
        Operation.ALL_REDUCE: 6.0, Operation.ALL_GATHER: 6.0, Operation.REDUCE_SCATTER: 6.0, Operation.ALL_TO_ALL: 2.0,
    }  # fmt: skip
    links = _FittedPart(names=("link_efficiency", "link_seconds", "chunk_seconds"), weights=link_weights)
    network = _FittedPart(names=("network_efficiency", "network_seconds", "half_message"), weights=link_weights)
    hops = _FittedPart(names=("hop_seconds",), weights={Operation.SEND: 6.0})
    for part, rows in ((links, inside), (network, across), (hops, inside)):
        rates = _fit(part, rows, cluster, engine, rates)
    errors = _layer_errors(computed, cluster, engine, rates)
    rates = dataclasses.replace(rates, **_file_bandwidths(record.rows, cluster))
    spread = spread_after(before.time_spread, errors)
    # A quick measurement sees few shapes, each only once: it does not narrow the band.
    spread = max(spread, before.time_spread) if record.quick else spread
    tail = before.time_tail if record.quick else tail_after(before.time_tail, len(errors))
    left = before.time_doubt if record.quick else left_after(before.time_doubt, len(errors))
    return dataclasses.replace(_counted(record, cluster, rates), time_spread=spread, time_tail=tail, time_doubt=left)


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
