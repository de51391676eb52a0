"""Quick calibration: an uncalibrated CPU machine is measured for a second or two before the first prediction for it.

The shipped coefficients are for GPUs; on a CPU they are off by a factor of ten. So predictions for ranks on this machine's CPUs
calibrate first. GPUs take longer to measure, and need `autotune calibrate`.
"""

import dataclasses
import logging
import os
import time
from typing import TYPE_CHECKING

from autotune.cluster.ray_cluster import address_of
from autotune.prediction.fitting.trial_history import same_hardware
from autotune.prediction.planning.calibrated import fingerprint
from autotune.session.session import Session
from executor.errors import RunnerError
from executor.runners.quick import measure_processors
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.presets import local_cluster
from search_spaces.errors import ClusterFormatError
from search_spaces.models.model import FactoryModel, ModelSpec
from storage.records import PROVENANCE, QUICK, CalibrationRecord

if TYPE_CHECKING:
    from storage.store import Store

SWITCH = "AUTOTUNE_QUICK_CALIBRATION"
"""Environment variable that disables it with the value `off`."""
MOST_RANKS = 16
"""With more forked ranks, the measurement takes too long."""

log = logging.getLogger(__name__)


def may_calibrate(cluster: ClusterSpec) -> bool:
    """Whether the cluster is this machine's CPUs, and quick calibration is enabled."""
    if os.environ.get(SWITCH) == "off" or cluster.device.kind != "cpu" or cluster.world_size > MOST_RANKS:
        return False
    try:
        return same_hardware(cluster, local_cluster(cluster.world_size))
    except ClusterFormatError:
        return False


def calibrate_quickly(store: "Store", cluster: ClusterSpec) -> CalibrationRecord | None:
    """Measure this machine's ranks and store the calibration if there is none yet; None: nothing was measured.

    A failure is logged: predictions then use the same data as before, and name it.
    """
    if not may_calibrate(cluster) or store.calibrations(fingerprint(cluster), limit=1):
        return None
    began = time.monotonic()
    try:
        result = measure_processors(cluster.world_size)
    except (RunnerError, OSError) as error:
        log.warning("%s", error)
        return None
    result = dataclasses.replace(result, environment={**result.environment, PROVENANCE: QUICK})
    return store.save_calibration(fingerprint(cluster), cluster, result, time.monotonic() - began)


def calibrate_for(store: "Store", session: Session) -> None:
    """`calibrate_quickly` for a job. Call it before the job's ranks start, because they would use the measured cores."""
    model = session.model
    predicted = isinstance(model, ModelSpec) or (isinstance(model, FactoryModel) and model.profile is not None)
    if predicted and address_of(session.request) is None:
        calibrate_quickly(store, session.cluster)
