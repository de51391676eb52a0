"""Rows of a micro-benchmark as cases: the time that the prediction equations assign to each row."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from autotune.prediction.cases.config_cases import engine_software, layouts_of, shapes_of
from autotune.prediction.equations.cases import Array, Cases, scalar, stacked
from autotune.prediction.equations.coefficients import Coefficients
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
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MeasuredRow, Operation, layer_model, network_sharing, ranks_in_domain
from search_spaces.models.model import ModelSpec
from search_spaces.trial_config import TrialConfig

Predicted = Callable[[Coefficients], Array]
"""Seconds of each row with these coefficients."""

VOLUMES = {
    Operation.ALL_REDUCE: 2.0, Operation.ALL_GATHER: 1.0, Operation.REDUCE_SCATTER: 1.0, Operation.ALL_TO_ALL: 1.0,
}  # fmt: skip
"""Operation -> volume through a rank's link, as a multiple of (n - 1) / n of the message."""


def predicted_rows(rows: Sequence[MeasuredRow], cluster: ClusterSpec, engine: str) -> Predicted:
    """The seconds that the equations predict for rows of one operation."""
    build = _BUILDERS[rows[0].operation]
    return build(rows, cluster, engine)


def link_volume(row: MeasuredRow) -> float:
    """Bytes that pass through a rank's link."""
    share = (row.group.ranks - 1) / row.group.ranks
    return row.shape[0] * VOLUMES[row.operation] * share if row.operation in VOLUMES else float(row.shape[0])


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
        exchanges,
        exchange_seconds(cases, group, volume, once, rates),
        collective_seconds(cases, group, volume, once, rates),
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
