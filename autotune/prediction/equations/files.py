"""States in files: seconds of a step, and the host memory that stays [Rajbhandari et al. 2021, ZeRO-Infinity]."""

import numpy as np

from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.parameters import layer_parameters
from search_spaces.offload_files import BUFFERS, CHUNK_ELEMENTS, UNITS


def file_update_seconds(cases: Cases, rates: Coefficients, elements: Array, shared: Array) -> Array:
    """Seconds in which what is in files of a rank is brought up to date; the update goes on beside it.

    The optimizer state of `elements` is read and written once, and the parameters of `shared` are written once. The ranks of a
    node share its file system, so that each has 1 / ranks of what was measured with all of them at work.
    """
    layouts = cases.layouts
    moved = 2 * layouts.optimizer_in_files * elements * cases.software.state_bytes
    moved = moved + layouts.parameters_in_files * shared * layouts.parameter_bytes
    seconds: Array = moved / _of_a_rank(cases, rates.file_update_bandwidth)
    return seconds


def file_read_seconds(cases: Cases, rates: Coefficients, shared: Array, pace: Array) -> Array:
    """Seconds in which a step waits for the parameters of `shared`, which are read twice a micro-batch of `pace` seconds.

    A unit is read while the one before it computes: what reading takes longer is waited for.
    """
    layouts = cases.layouts
    read = 2 * layouts.parameters_in_files * shared * layouts.parameter_bytes / _of_a_rank(cases, rates.file_read_bandwidth)
    seconds: Array = layouts.accumulation * np.maximum(read - pace, 0.0)
    return seconds


def host_elements(cases: Cases, offloaded: Array) -> Array:
    """Of a rank's `offloaded` elements, those whose state is in host memory at once: of files, what the buffers hold."""
    held: Array = np.where(cases.layouts.optimizer_in_files > 0, np.minimum(offloaded, BUFFERS * CHUNK_ELEMENTS), offloaded)
    return held


def host_parameter_bytes(cases: Cases, offloaded: Array) -> Array:
    """Of the bytes of a rank's offloaded parameters, those that are in host memory at once: of files, what the buffers hold.

    These are of units that are read, and of chunks of the update that are written.
    """
    width = cases.layouts.parameter_bytes
    layer = layer_parameters(cases)
    unit = (layer.attention + layer.dense + layer.experts / cases.layouts.expert) / cases.layouts.tensor
    table = cases.shapes.vocabulary * cases.shapes.hidden / cases.layouts.tensor
    units = UNITS * np.maximum(unit, table) / cases.layouts.shard * width
    written = BUFFERS / 2 * np.minimum(offloaded, CHUNK_ELEMENTS * width)
    held: Array = np.where(cases.layouts.parameters_in_files > 0, np.minimum(units + written, offloaded), offloaded)
    return held


def _of_a_rank(cases: Cases, bandwidth: float) -> Array:
    layouts = cases.layouts
    ranks = layouts.data * layouts.tensor * layouts.pipeline * layouts.context
    share: Array = bandwidth / np.minimum(cases.hardware.devices_per_node, ranks)
    return share
