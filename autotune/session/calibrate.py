"""A cluster's calibration: what the database has of it, else a micro-benchmark on its ranks."""

import importlib.metadata
import time
import uuid
from dataclasses import dataclass

from autotune.cluster.machine import cluster_here
from autotune.cluster.ray_cluster import address_of
from autotune.errors import RequestError
from autotune.prediction.planning.calibrated import fingerprint
from autotune.request.engines import capability_of
from autotune.request.request import RUNNERS, JobRequest
from autotune.session.nvme import require_folder
from autotune.session.runners import start_ranks
from search_spaces.cluster import ClusterSpec
from search_spaces.microbenchmark import MicrobenchmarkRequest
from storage.records import CalibrationRecord
from storage.store import Store

LEAST_SECONDS = 2.0
MOST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What is to be measured, and with what.

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
    """About what the measurement may take, beside the start of the ranks."""
    timeout: float = 300.0
    """Seconds after which the ranks are killed."""
    nvme_path: str | None = None
    """The folder whose file system is measured too: where states are offloaded to files; None: none is."""
    force: bool = False
    """Measure also where the database has a calibration."""

    def __post_init__(self) -> None:
        if self.runner not in RUNNERS:
            raise RequestError("runner", f"{self.runner!r} is not known", f"use one of {', '.join(RUNNERS)}")
        capability_of(self.engine)
        if not LEAST_SECONDS <= self.seconds <= MOST_SECONDS:
            bounds = f"between {LEAST_SECONDS:g} and {MOST_SECONDS:g}"
            raise RequestError("seconds", f"{self.seconds:g} is not {bounds}", "give seconds such as 20")
        if not self.timeout > self.seconds:
            problem = f"{self.timeout:g} is not more than the {self.seconds:g} seconds of the measurement"
            raise RequestError("timeout", problem, "give several times as many")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was found or measured."""

    cluster: ClusterSpec
    record: CalibrationRecord
    reused: bool
    reason: str
    """Why it was measured, or not."""


def prepare_calibration(store: Store, request: CalibrationRequest) -> tuple[ClusterSpec, Calibration | None, str]:
    """The cluster, what can be reused, and why not where nothing can. No rank is started.

    A calibration is reused where hardware and torch are the same: another torch has other kernels.

    Raises:
        RequestError, SearchSpaceError: the cluster is not known, or not here.
    """
    asked = _asked(request)
    cluster = cluster_here(asked)
    if address_of(asked) is None:
        require_folder(asked)
    if request.force:
        return cluster, None, "--force was given"
    newest = store.calibrations(fingerprint(cluster), limit=1)
    if not newest:
        return cluster, None, "nothing was measured on this hardware before"
    if newest[0].quick:
        return cluster, None, "this hardware was measured quickly before, and not in full"
    then, now = _release(newest[0].environment.get("torch", "")), _release(importlib.metadata.version("torch"))
    if then != now:
        return cluster, None, f"it was measured with torch {then} before, and this is {now}"
    if request.nvme_path is not None and newest[0].environment.get("nvme_path") != request.nvme_path:
        return cluster, None, f"the files of {request.nvme_path} were not measured before"
    reason = "hardware and torch are the same; --force measures anew"
    return cluster, Calibration(cluster=cluster, record=newest[0], reused=True, reason=reason), ""


def measure_cluster(store: Store, request: CalibrationRequest, cluster: ClusterSpec, reason: str) -> Calibration:
    """Start the ranks, measure, keep what was measured.

    Raises:
        RunnerError: ranks cannot be started, or the micro-benchmark failed on them.
    """
    began = time.monotonic()
    address = address_of(_asked(request))
    with start_ranks(request.runner, cluster.world_size, cluster.device.kind, ray_address=address) as runner:
        wanted = MicrobenchmarkRequest(
            attempt=f"calibration-{uuid.uuid4().hex[:12]}",
            world_size=cluster.world_size,
            seconds=request.seconds,
            timeout_seconds=request.timeout,
            nvme_path=request.nvme_path,
        )
        result = runner.measure(wanted)
        took = time.monotonic() - began
    record = store.save_calibration(fingerprint(cluster), cluster, result, took)
    return Calibration(cluster=cluster, record=record, reused=False, reason=reason)


def _asked(request: CalibrationRequest) -> JobRequest:
    """A job on the same ranks: what it runs does not matter."""
    return JobRequest(
        model="any", cluster=request.cluster, ranks=request.ranks, runner=request.runner, ray_address=request.ray_address,
        nvme_path=request.nvme_path,
    )  # fmt: skip


def _release(version: str) -> str:
    """Without what a build adds: +cpu, +cu130."""
    return version.partition("+")[0]
