"""States in files: seconds of a step, and the remaining host memory [Rajbhandari et al. 2021, ZeRO-Infinity]."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.parameters import layer_parameters, own_experts
from search_spaces.training.states import BUFFERS, CHUNK_ELEMENTS, UNITS


def file_update_seconds(cases: Cases, rates: Coefficients, elements: Array, shared: Array) -> Array:
    """Seconds to update a rank's states in files; the computation of the update overlaps with this.

    The optimizer state of `elements` is read and written once, and the parameters of `shared` are written once. The ranks of a
    node share its file system, so each gets 1 / ranks of the bandwidth measured with all of them active.
    """
    layouts = cases.layouts
    moved = 2 * layouts.optimizer_in_files * elements * cases.software.state_bytes
    moved = moved + layouts.parameters_in_files * shared * layouts.parameter_bytes
    seconds: Array = moved / _of_a_rank(cases, rates.file_update_bandwidth)
    return seconds


def file_read_seconds(cases: Cases, rates: Coefficients, shared: Array, pace: Array) -> Array:
    """Seconds per step spent waiting for the parameters of `shared`, which are read twice per micro-batch of `pace` seconds.

    A unit is read while the one before it computes; only the excess of the read time is waited for.
    """
    layouts = cases.layouts
    if not np.any(layouts.parameters_in_files > 0):
        return np.zeros(1)
    read = 2 * layouts.parameters_in_files * shared * layouts.parameter_bytes / _of_a_rank(cases, rates.file_read_bandwidth)
    seconds: Array = layouts.accumulation * np.maximum(read - pace, 0.0)
    return seconds


def host_elements(cases: Cases, offloaded: Array) -> Array:
    """The part of a rank's `offloaded` elements whose state is in host memory at once: with files, what the buffers hold."""
    elements: Array = np.where(cases.layouts.optimizer_in_files > 0, np.minimum(offloaded, BUFFERS * CHUNK_ELEMENTS), offloaded)
    return elements


def host_parameter_bytes(cases: Cases, offloaded: Array) -> Array:
    """Bytes of a rank's offloaded parameters that are in host memory at once: with files, what the buffers hold.

    The buffers hold units being read and chunks of the update being written.
    """
    if not np.any(cases.layouts.parameters_in_files > 0):
        return offloaded
    width = cases.layouts.parameter_bytes
    layer = layer_parameters(cases)
    unit = (layer.attention + layer.dense) / cases.layouts.tensor + own_experts(cases, layer)
    table = cases.shapes.vocabulary * cases.shapes.hidden / cases.layouts.tensor
    units = UNITS * np.maximum(unit, table) / cases.layouts.shard * width
    written = BUFFERS / 2 * np.minimum(offloaded, CHUNK_ELEMENTS * width)
    host_bytes: Array = np.where(cases.layouts.parameters_in_files > 0, np.minimum(units + written, offloaded), offloaded)
    return host_bytes


def _of_a_rank(cases: Cases, bandwidth: float) -> Array:
    layouts = cases.layouts
    ranks = layouts.data * layouts.tensor * layouts.pipeline * layouts.context
    share: Array = bandwidth / np.minimum(cases.hardware.devices_per_node, ranks)
    return share
