"""An uncalibrated machine is measured in a second or two before anything is predicted of it.

The shipped coefficients are those of GPUs: on a CPU they are off by a factor of ten. So what predicts for ranks on this
machine's own processors asks here first. GPUs are left to `autotune calibrate`: measuring them takes longer.
"""

import dataclasses
import logging
import os
import time

from autotune.cluster.ray_cluster import address_of
from autotune.prediction.fitting.trial_history import same_hardware
from autotune.prediction.planning.calibrated import fingerprint
from autotune.session.session import Session
from executor.errors import RunnerError
from executor.runners.quick import measure_processors
from search_spaces.cluster import ClusterSpec
from search_spaces.clusters import local_cluster
from search_spaces.errors import ClusterFormatError
from search_spaces.model import ModelSpec
from storage.records import PROVENANCE, QUICK, CalibrationRecord
from storage.store import Store

SWITCH = "AUTOTUNE_QUICK_CALIBRATION"
"""Variable that switches it off: `off`."""
MOST_RANKS = 16
"""Forked ranks beyond these take longer than the measurement may."""

log = logging.getLogger(__name__)


def may_calibrate(cluster: ClusterSpec) -> bool:
    """Whether the cluster is the processors of this machine, and measuring them is not switched off."""
    if os.environ.get(SWITCH) == "off" or cluster.device.kind != "cpu" or cluster.world_size > MOST_RANKS:
        return False
    try:
        return same_hardware(cluster, local_cluster(cluster.world_size))
    except ClusterFormatError:
        return False


def calibrate_quickly(store: Store, cluster: ClusterSpec) -> CalibrationRecord | None:
    """Measure and keep what ranks of this machine do, where nothing was measured yet; None: nothing was measured now.

    A failure is logged: predictions then rest on what they rested on before, and say so.
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


def calibrate_for(store: Store, session: Session) -> None:
    """The same for a job, before its ranks start: they would take the cores that are measured."""
    if isinstance(session.model, ModelSpec) and address_of(session.request) is None:
        calibrate_quickly(store, session.cluster)
