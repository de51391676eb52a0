"""A cluster's calibration: from the database, else from a micro-benchmark, which is quick on an uncalibrated CPU machine.

The shipped coefficients are for GPUs; on a CPU they are off by a factor of ten. So predictions for ranks on this machine's CPUs
calibrate first. GPUs take longer to measure, and need `autotune calibrate`.
"""

import dataclasses
import importlib.metadata
import logging
import os
import time
import uuid
from dataclasses import dataclass

from autotune.errors import RequestError
from autotune.prediction.fitting.trial_fit import same_hardware
from autotune.prediction.planning.calibrated import fingerprint
from autotune.ray_cluster import address_of, cluster_here
from autotune.request.engines import capability_of
from autotune.request.job_fields import RUNNERS
from autotune.request.request import JobRequest
from autotune.session.feasible import require_folder
from autotune.session.session import Session
from autotune.session.trial_requests import start_ranks
from executor.errors import RunnerError
from executor.runners.one_process import measure_processors
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MicrobenchmarkRequest
from search_spaces.clusters.presets import local_cluster
from search_spaces.errors import ClusterFormatError
from search_spaces.models.model import FactoryModel, ModelSpec
from storage.records import PROVENANCE, QUICK, CalibrationRecord
from storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What to measure, and on which ranks.

    Raises:
        RequestError: a field is outside its range.
    """

    cluster: str = "local"
    ranks: int | None = None
    runner: str = "ray"
    ray_address: str | None = None
    """See `JobRequest.ray_address`."""
    engine: str = "native"
    seconds: float = 20.0
    """Approximate duration of the measurement, without the start of the ranks."""
    timeout: float = 300.0
    """Seconds after which the ranks are killed."""
    nvme_path: str | None = None
    """Also measure the file system of this folder, to which states are offloaded; None: no file system."""
    force: bool = False
    """Measure even if the database has a calibration."""

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise RequestError("runner", f"{self.runner!r} is not known", f"use one of {', '.join(RUNNERS)}")
        capability_of(self.engine)
        least_seconds = 2.0
        most_seconds = 3600.0
        if not least_seconds <= self.seconds <= most_seconds:
            bounds = f"between {least_seconds:g} and {most_seconds:g}"
            raise RequestError("seconds", f"{self.seconds:g} is not {bounds}", "give seconds such as 20")
        if not self.timeout > self.seconds:
            problem = f"{self.timeout:g} is not more than the {self.seconds:g} seconds of the measurement"
            raise RequestError("timeout", problem, "give several times as many")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibration, reused or new."""

    cluster: ClusterSpec
    record: CalibrationRecord
    reused: bool
    reason: str
    """Why it was measured or reused."""


def prepare_calibration(store: Store, request: CalibrationRequest) -> tuple[ClusterSpec, Calibration | None, str]:
    """Return the cluster, its reusable calibration, and if there is none, why. Starts no ranks.

    A calibration is reused if hardware and torch version are the same: another torch version has other kernels.

    Raises:
        RequestError, SearchSpaceError: the cluster is unknown, or not here.
    """
    job = _job_request(request)
    cluster = cluster_here(job)
    if address_of(job) is None:
        require_folder(job)
    if request.force:
        return cluster, None, "--force was given"
    newest = store.calibrations.newest(fingerprint(cluster), limit=1)
    if not newest:
        return cluster, None, "nothing was measured on this hardware before"
    if newest[0].quick:
        return cluster, None, "this hardware was measured quickly before, and not in full"
    measured_release, present_release = (
        _release(newest[0].environment.get("torch", "")),
        _release(importlib.metadata.version("torch")),
    )
    if measured_release != present_release:
        return cluster, None, f"it was measured with torch {measured_release} before, and this is {present_release}"
    if request.nvme_path is not None and newest[0].environment.get("nvme_path") != request.nvme_path:
        return cluster, None, f"the files of {request.nvme_path} were not measured before"
    reason = "hardware and torch are the same; --force measures again"
    return cluster, Calibration(cluster=cluster, record=newest[0], reused=True, reason=reason), ""


def measure_cluster(store: Store, request: CalibrationRequest, cluster: ClusterSpec, reason: str) -> Calibration:
    """Start the ranks, measure, and store the calibration.

    Raises:
        RunnerError: ranks cannot be started, or the micro-benchmark failed on them.
    """
    began = time.monotonic()
    address = address_of(_job_request(request))
    with start_ranks(request.runner, cluster.world_size, cluster.device.kind, ray_address=address) as runner:
        benchmark = MicrobenchmarkRequest(
            attempt=f"calibration-{uuid.uuid4().hex[:12]}",
            world_size=cluster.world_size,
            seconds=request.seconds,
            timeout_seconds=request.timeout,
            nvme_path=request.nvme_path,
        )
        result = runner.measure(benchmark)
        took = time.monotonic() - began
    record = store.calibrations.save(fingerprint(cluster), cluster, result, took)
    return Calibration(cluster=cluster, record=record, reused=False, reason=reason)


def _job_request(request: CalibrationRequest) -> JobRequest:
    """A job request for the same ranks; its model does not matter."""
    return JobRequest(
        model="any", cluster=request.cluster, ranks=request.ranks, runner=request.runner, ray_address=request.ray_address,
        nvme_path=request.nvme_path,
    )  # fmt: skip


def _release(version: str) -> str:
    """The version without its build suffix, such as +cpu or +cu130."""
    return version.partition("+")[0]


SWITCH = "AUTOTUNE_QUICK_CALIBRATION"
"""Environment variable that disables it with the value `off`."""

log = logging.getLogger(__name__)


def may_calibrate(cluster: ClusterSpec) -> bool:
    """Whether the cluster is this machine's CPUs, and quick calibration is enabled."""
    # With more forked ranks, the measurement takes too long.
    if os.environ.get(SWITCH) == "off" or cluster.device.kind != "cpu" or cluster.world_size > 16:
        return False
    try:
        return same_hardware(cluster, local_cluster(cluster.world_size))
    except ClusterFormatError:
        return False


def calibrate_quickly(store: Store, cluster: ClusterSpec) -> CalibrationRecord | None:
    """Measure this machine's ranks and store the calibration if there is none yet; None: nothing was measured.

    A failure is logged: predictions then use the same data as before, and name it.
    """
    if not may_calibrate(cluster) or store.calibrations.newest(fingerprint(cluster), limit=1):
        return None
    began = time.monotonic()
    try:
        result = measure_processors(cluster.world_size)
    except (RunnerError, OSError) as error:
        log.warning("%s", error)
        return None
    result = dataclasses.replace(result, environment={**result.environment, PROVENANCE: QUICK})
    return store.calibrations.save(fingerprint(cluster), cluster, result, time.monotonic() - began)


def calibrate_for(store: Store, session: Session) -> None:
    """`calibrate_quickly` for a job. Call it before the job's ranks start, because they would use the measured cores."""
    model = session.model
    predicted = isinstance(model, ModelSpec) or (isinstance(model, FactoryModel) and model.profile is not None)
    if predicted and address_of(session.request) is None:
        calibrate_quickly(store, session.cluster)
