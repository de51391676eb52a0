"""Trials of the database on the same hardware: their configurations and measurements."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autotune.errors import AutotuneError
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array, Cases
from autotune.request.earlier_trial import EarlierTrial
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_row
from search_spaces.clusters.cluster import PCIE_COPIES, ClusterSpec
from search_spaces.errors import SearchSpaceError
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig
from storage.errors import DamagedRowError
from storage.records import JobRecord, TrialRecord

if TYPE_CHECKING:
    from storage.store import Store

MOST_JOBS = 200
MOST_CONFIGURATIONS = 400
PAGE = 50
MOST_NOISE = 1.0
"""Noise of a trial without an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Measured configurations of one model and workload; repeats are averaged."""

    cases: Cases
    configs: tuple[TrialConfig, ...]
    keys: tuple[str, ...]
    """The identity of each configuration."""
    seconds: Array
    """Seconds of an optimizer step."""
    peaks: Array
    """Peak bytes allocated by torch's allocator on the fullest rank; NaN: not measured."""
    repeats: Array
    """Number of trials averaged in each value."""
    noise: Array
    """Standard deviation of the logarithm of each value of seconds, from its trials."""


@dataclass(slots=True)
class _Gathered:
    """The trials of one model, workload, precision and attention kernel."""

    model: ModelSpec
    workload: Workload
    trials: dict[str, list[tuple[TrialConfig, float, float, float]]] = field(default_factory=dict)
    """Configuration's hash -> (configuration, step seconds, peak, standard deviation of the logarithm of the seconds)."""


def trial_history(store: "Store", cluster: ClusterSpec, engine: str) -> list[Runs]:
    """Measurements of the newest jobs on the same hardware and engine: trials that are OK and stable."""
    groups: dict[tuple[object, ...], _Gathered] = {}
    count = 0
    for job, request in _jobs(store, cluster, engine):
        if count >= MOST_CONFIGURATIONS:
            break
        model = request.resolved_model
        assert isinstance(model, ModelSpec)
        for trial in _trials(store, job.id):
            if count >= MOST_CONFIGURATIONS:
                break
            figures = _figures(trial, request)
            if figures is None or trial.config.environment in request.resolved_environments:
                continue
            config = trial.config
            # Seed and text do not affect the time.
            workload = Workload(
                global_batch_size=request.global_batch_size,
                sequence_length=request.sequence_length,
                training_steps=request.training_steps,
                document_lengths=request.document_lengths,
            )
            key = (model, workload, config.precision, config.attention_backend == "math")
            gathered = groups.setdefault(key, _Gathered(model, workload))
            count += config.hash not in gathered.trials
            gathered.trials.setdefault(config.hash, []).append((config, *figures))
    return [_runs(gathered, cluster, engine) for gathered in groups.values()]


def earlier_runs(
    trials: Sequence[EarlierTrial], model: ModelSpec, workload: Workload, cluster: ClusterSpec, engine: str
) -> list[Runs]:
    """Trials from outside of the database, of one model and workload."""
    groups: dict[tuple[object, ...], _Gathered] = {}
    for trial in trials[:MOST_CONFIGURATIONS]:
        config = trial.config
        gathered = groups.setdefault((config.precision, config.attention_backend == "math"), _Gathered(model, workload))
        seconds, peak = workload.global_batch_size / trial.samples_per_second, float(trial.peak_memory_bytes or math.nan)
        gathered.trials.setdefault(config.hash, []).append((config, seconds, peak, trial.noise))
    return [_runs(gathered, cluster, engine) for gathered in groups.values()]


def jobs_elsewhere(store: "Store", cluster: ClusterSpec, engine: str) -> int:
    """How many of the newest jobs of the engine ran on other hardware."""
    return sum(not same_hardware(job_cluster, cluster) for _, _, job_cluster in _readable(store, engine))


def same_hardware(first: ClusterSpec, second: ClusterSpec) -> bool:
    """Whether trials on one apply to the other: all but the names and the memory limit is equal."""
    return hardware_key(first) == hardware_key(second)


def hardware_key(cluster: ClusterSpec) -> dict[str, object]:
    """The properties that determine a cluster's speed, as plain data."""
    return {
        "device": cluster.device.name,
        "kind": cluster.device.kind,
        "peak_flops": dict(cluster.device.peak_flops),
        "memory_bandwidth": cluster.device.memory_bandwidth,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "intra_node_bandwidth": cluster.intra_node_bandwidth,
        "inter_node_bandwidth": cluster.inter_node_bandwidth,
        "cores_per_node": cluster.cores_per_node,
        **({"host_link": cluster.device.host_link} if cluster.device.host_link != PCIE_COPIES else {}),
        **({"link_domain_size": cluster.link_domain_size} if cluster.nodes_per_link_domain > 1 else {}),
        **({"groups": to_plain(cluster.groups)} if cluster.groups else {}),
    }


def _trials(store: "Store", job_id: str) -> Iterator[TrialRecord]:
    """A job's trials in batches: of a long job the first ones suffice. A damaged row ends the iteration."""
    first = 0
    with contextlib.suppress(DamagedRowError):
        while part := store.trials.figures_of(job_id, first, MOST_CONFIGURATIONS):
            yield from part
            first = part[-1].number + 1


def _jobs(store: "Store", cluster: ClusterSpec, engine: str) -> Iterator[tuple[JobRecord, JobRequest]]:
    for job, request, job_cluster in _readable(store, engine):
        if isinstance(request.resolved_model, ModelSpec) and same_hardware(job_cluster, cluster):
            yield job, request


def _readable(store: "Store", engine: str) -> Iterator[tuple[JobRecord, JobRequest, ClusterSpec]]:
    """The newest jobs of the engine that this version can read, with their cluster."""
    before, job_count = None, 0
    while job_count < MOST_JOBS and (page := store.jobs.newest(limit=PAGE, before=before)):
        before, job_count = page[-1].id, job_count + len(page)
        for job in page:
            request = _request(job)
            if request is not None and request.resolved_cluster is not None and request.engine == engine:
                yield job, request, request.resolved_cluster


def _request(job: JobRecord) -> JobRequest | None:
    """Return None if this version cannot read the request: an old job must not prevent a prediction."""
    try:
        return request_from_row(job.request)
    except (AutotuneError, SearchSpaceError):
        return None


def _figures(trial: TrialRecord, request: JobRequest) -> tuple[float, float, float] | None:
    result = trial.result
    if trial.outcome is not Outcome.OK or result is None or result.unstable or result.samples_per_second is None:
        return None
    interval = result.samples_per_second
    rate = interval.mean
    if not (math.isfinite(rate) and rate > 0):
        return None
    noise = math.log(interval.high / interval.low) / (2 * 1.96) if 0 < interval.low <= interval.high < math.inf else MOST_NOISE
    return request.global_batch_size / rate, float(result.peak_memory_bytes or math.nan), min(noise, MOST_NOISE)


def _runs(gathered: _Gathered, cluster: ClusterSpec, engine: str) -> Runs:
    trials = list(gathered.trials.values())
    return Runs(
        cases=cases_of(gathered.model, cluster, gathered.workload, [same[0][0] for same in trials], engine),
        configs=tuple(same[0][0] for same in trials),
        keys=tuple(gathered.trials),
        seconds=np.array([math.exp(float(np.mean([math.log(seconds) for _, seconds, _, _ in same]))) for same in trials]),
        peaks=np.array([float(np.nanmax([peak for _, _, peak, _ in same])) if _known(same) else math.nan for same in trials]),
        repeats=np.array([float(len(same)) for same in trials]),
        noise=np.array([_noise(same) for same in trials]),
    )


def _known(same: list[tuple[TrialConfig, float, float, float]]) -> bool:
    return any(not math.isnan(peak) for _, _, peak, _ in same)


def _noise(same: list[tuple[TrialConfig, float, float, float]]) -> float:
    """Noise of the mean: the noise within the trials or the variation between them, whichever is larger."""
    logs = [math.log(seconds) for _, seconds, _, _ in same]
    between = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0
    within = math.sqrt(float(np.mean([noise**2 for _, _, _, noise in same])))
    return max(between, within) / math.sqrt(len(same))
