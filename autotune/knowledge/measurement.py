"""One measurement: a configuration of a model on hardware, and what was measured. Those of rows and of a database's jobs."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.errors import AutotuneError
from autotune.knowledge.row import LEARNED_COLUMNS, RowOutcome, TableRow, peak_bytes, step_seconds
from autotune.knowledge.row_cases import refusal
from autotune.knowledge.row_names import network_understood
from autotune.prediction.fitting.trial_fit import MOST_CONFIGURATIONS, MOST_JOBS, MOST_NOISE, PAGE, hardware_key, noise_of_mean
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_row, request_of
from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.errors import SearchSpaceError
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial import Workload
from search_spaces.trial_config import TrialConfig, stable_hash
from storage.records import FULL, JobRecord, TrialRecord

if TYPE_CHECKING:
    from storage.store import Store

LONGEST_TEXT = 2_000
"""Characters of a cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSetting:
    """The model, cluster, engine and workload of trials of this product."""

    model: ModelSpec
    cluster: ClusterSpec
    engine: str
    global_batch_size: int
    sequence_length: int
    training_steps: int | None = None
    document_lengths: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Equal for equal settings."""
        return stable_hash(to_plain(self))

    @property
    def workload(self) -> Workload:
        """The workload, without seeds and paths, which do not change a trial's time."""
        return Workload(
            global_batch_size=self.global_batch_size,
            sequence_length=self.sequence_length,
            training_steps=self.training_steps,
            document_lengths=self.document_lengths,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialMeasurement:
    """A trial of this product, or several of one configuration, in all detail."""

    setting: TrialSetting
    config: TrialConfig
    samples_per_second: float | None
    """None: it ran out of memory."""
    peak_memory_bytes: float | None
    """Of torch's allocator on the fullest rank; None: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a source measured: a row of a table, or a trial of this product."""

    source: str
    """Equal for measurements by one protocol."""
    measured: TableRow | TrialMeasurement
    repeats: int = 1
    noise: float = 0.05
    """Standard deviation of the logarithm of the rate; the default is for tables, which state no interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Measurements, and why others are left out."""

    measurements: tuple[Measurement, ...]
    left_out: Mapping[str, int]
    """Reason -> number of rows or trials."""

    def lines(self, name: str) -> tuple[str, ...]:
        """A line for each reason. `name`: of what they were collected from."""
        return tuple(
            f"{name}: {count:,} measurement{'s' * (count > 1)} left out: {why}" for why, count in self.left_out.items()
        )


def measurements_of_rows(rows: Iterable[TableRow]) -> Collected:
    """The rows of a table that predictions can learn from."""
    measurements, left_out = [], Counter[str]()
    for row in rows:
        if (why := _unusable_row(row)) is not None:
            left_out[why] += 1
            continue
        source = row.source or "table"
        network = row.inter_bw if network_understood(row.inter_bw) else None
        measurements.append(Measurement(source=source, measured=dataclasses.replace(row, source=source, inter_bw=network)))
    return Collected(measurements=tuple(measurements), left_out=dict(left_out))


def measurements_of_job(request: JobRequest, trials: Sequence[TrialRecord], source: str) -> Collected:
    """The trials of a job: those that are measured in full and stable, and those that ran out of memory."""
    setting = _setting(request)
    if isinstance(setting, str):
        return Collected(measurements=(), left_out={setting: len(trials)} if trials else {})
    trials_by_config: dict[str, list[TrialRecord]] = {}
    left_out = dict[str, int]()
    for trial in trials:
        why = _unusable_trial(trial)
        if why is None:
            trials_by_config.setdefault(trial.config_hash, []).append(trial)
        else:
            left_out[why] = left_out.get(why, 0) + 1
    measurements = [
        Measurement(source=source, measured=_combined(setting, same), repeats=len(same), noise=_noise(same))
        for same in trials_by_config.values()
    ]
    return Collected(measurements=tuple(measurements), left_out=left_out)


def _setting(request: JobRequest) -> TrialSetting | str:
    model, cluster = request.resolved_model, request.resolved_cluster
    if not isinstance(model, ModelSpec) or cluster is None:
        return "the job's model is a module or a script, whose layers are unknown"
    if cluster.groups:
        return "the job's nodes differ"
    return TrialSetting(
        model=model,
        cluster=cluster,
        engine=request.engine,
        global_batch_size=request.global_batch_size,
        sequence_length=request.sequence_length,
        training_steps=request.training_steps,
        document_lengths=tuple(request.document_lengths),
    )


def _unusable_row(row: TableRow) -> str | None:
    """Why nothing can be learned from a row; None: something can."""
    if (why := refusal(row)) is not None:
        return why
    if row.batch_problem:
        return "its batch contradicts its layout"
    if row.outcome is not RowOutcome.OOM and not step_seconds(row) and not peak_bytes(row):
        return "nothing was measured"
    if any(len(str(getattr(row, name))) > LONGEST_TEXT for name in LEARNED_COLUMNS):
        return f"a cell has more than {LONGEST_TEXT:,} characters"
    return None


def _unusable_trial(trial: TrialRecord) -> str | None:
    result = trial.result
    if trial.config.environment:
        return "it ran with environment variables, whose effect is not predicted"
    if trial.outcome is Outcome.INFEASIBLE and trial.attempts:
        return None
    if trial.outcome is not Outcome.OK or result is None or result.samples_per_second is None:
        return "it has no measured rate"
    if result.unstable:
        return "it was unstable"
    if trial.fidelity != FULL or result.extrapolated:
        return "it was not measured in full"
    if not (math.isfinite(result.samples_per_second.mean) and result.samples_per_second.mean > 0):
        return "it has no measured rate"
    return None


def _combined(setting: TrialSetting, same: Sequence[TrialRecord]) -> TrialMeasurement:
    results = [trial.result for trial in same if trial.outcome is Outcome.OK and trial.result is not None]
    rates = [result.samples_per_second.mean for result in results if result.samples_per_second is not None]
    peaks = [result.peak_memory_bytes for result in results if result.peak_memory_bytes]
    return TrialMeasurement(
        setting=setting,
        config=same[0].config,
        samples_per_second=math.exp(sum(map(math.log, rates)) / len(rates)) if rates else None,
        peak_memory_bytes=float(max(peaks)) if peaks else None,
    )


def _noise(same: Sequence[TrialRecord]) -> float:
    """The noise of the mean of the trials' logarithms."""
    intervals = [trial.result.samples_per_second for trial in same if trial.result is not None]
    measured = [
        (interval.mean, deviation) for interval in intervals if interval and (deviation := interval.log_deviation) is not None
    ]
    if not measured:
        return MOST_NOISE
    return min(noise_of_mean([mean for mean, _ in measured], [deviation for _, deviation in measured]), MOST_NOISE)


def job_measurements(store: "Store", job_id: str) -> Collected:
    """The measurements of one job.

    Raises:
        LookupError: there is no such job.
        JobNotResumableError: this version cannot read it.
    """
    job = store.jobs.get(job_id)
    return _collected(store, job, request_of(job))


def local_measurements(store: "Store") -> tuple[Measurement, ...]:
    """The measurements of the newest jobs of which this version can read the request."""
    measurements = list[Measurement]()
    for job in _jobs(store):
        try:
            request = request_from_row(job.request)
        except (AutotuneError, SearchSpaceError):
            continue
        measurements += _collected(store, job, request).measurements
        if len(measurements) >= MOST_CONFIGURATIONS:
            break
    return tuple(measurements)


def _jobs(store: "Store") -> Iterator[JobRecord]:
    before, job_count = None, 0
    while job_count < MOST_JOBS and (page := store.jobs.newest(limit=PAGE, before=before)):
        before, job_count = page[-1].id, job_count + len(page)
        yield from (job for job in page if not job.damage)


def _collected(store: "Store", job: JobRecord, request: JobRequest) -> Collected:
    if request.resolved_cluster is None:
        return Collected(measurements=(), left_out={})
    # One source for each engine on each kind of hardware: these have one protocol.
    source = f"local/{stable_hash([request.engine, hardware_key(request.resolved_cluster)])}"
    return measurements_of_job(request, store.trials.of(job.id), source)
