"""Trials of the database on the same hardware, and coefficients that are fitted to them.

Coefficients are fitted by maximum a posteriori; some only trials can determine.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autotune.errors import AutotuneError
from autotune.prediction.cases.config_cases import cases_of
from autotune.prediction.equations.cases import Array, Cases
from autotune.prediction.equations.coefficients import Coefficients, names, spread
from autotune.prediction.equations.memory import memory
from autotune.prediction.equations.step import seconds_of
from autotune.request.request import JobRequest
from autotune.request.rows import request_from_row
from search_spaces.clusters.cluster import PCIE_COPIES, ClusterSpec
from search_spaces.errors import SearchSpaceError
from search_spaces.models.model import ModelSpec
from search_spaces.outcome import Outcome
from search_spaces.plain import to_plain
from search_spaces.trial import EarlierTrial, Workload
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
    likeness: float = 1.0
    """How much of their errors what is predicted shares: 1 for trials of the same software and hardware, less for others'."""

    @property
    def worth(self) -> float:
        """How many trials of what is predicted a value is worth. All of a source that is not alike share an error, so that
        together they are worth at most likeness / (1 - likeness).
        """
        return self.likeness / (self.likeness + len(self.keys) * (1 - self.likeness))


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
    rate, noise = result.samples_per_second.mean, result.samples_per_second.log_deviation
    if not (math.isfinite(rate) and rate > 0):
        return None
    noise = MOST_NOISE if noise is None else min(noise, MOST_NOISE)
    return request.global_batch_size / rate, float(result.peak_memory_bytes or math.nan), noise


def _runs(gathered: _Gathered, cluster: ClusterSpec, engine: str) -> Runs:
    trials = list(gathered.trials.values())
    return Runs(
        cases=cases_of(gathered.model, cluster, gathered.workload, [same[0][0] for same in trials], engine),
        configs=tuple(same[0][0] for same in trials),
        keys=tuple(gathered.trials),
        seconds=np.array([math.exp(float(np.mean([math.log(seconds) for _, seconds, _, _ in same]))) for same in trials]),
        peaks=np.array([float(np.nanmax([peak for _, _, peak, _ in same])) if _known(same) else math.nan for same in trials]),
        repeats=np.array([float(len(same)) for same in trials]),
        noise=np.array(
            [noise_of_mean([seconds for _, seconds, _, _ in same], [noise for *_, noise in same]) for same in trials]
        ),
    )


def _known(same: list[tuple[TrialConfig, float, float, float]]) -> bool:
    return any(not math.isnan(peak) for _, _, peak, _ in same)


def noise_of_mean(figures: Sequence[float], noises: Sequence[float]) -> float:
    """Noise of the mean of logarithms: the noise within the trials or the variation between them, whichever is larger."""
    between = float(np.std([math.log(figure) for figure in figures], ddof=1)) if len(figures) > 1 else 0.0
    within = math.sqrt(float(np.mean([noise**2 for noise in noises])))
    return max(between, within) / math.sqrt(len(figures))


TIME_NOISE = 0.08
"""Standard deviation of the logarithm of a step's seconds that the equations cannot explain."""


def fit_runs(history: Sequence[Runs], before: Coefficients) -> tuple[Coefficients, int]:
    """Return the most probable coefficients given trials on the same hardware, and the number of those trials.

    `before` (shipped, or from a micro-benchmark) is the prior, so that a few trials change little.

    1. Fit the time coefficients to step times, with lower weight for noisy ones, and those of memory to the allocator's peaks.
    2. Spreads are computed from leave-one-out errors of the configurations, with the prior spread counting as a number of
       errors.
    """
    seconds = [(runs, runs.seconds, runs.noise) for runs in history]
    peaks = [(runs, runs.peaks, np.zeros(len(runs.keys))) for runs in history]
    time_figures = _Figures(seconds, lambda runs, rates: seconds_of(runs.cases, rates))
    memory_figures = _Figures(peaks, lambda runs, rates: memory(runs.cases, rates).allocated)
    rates, time_errors = _fit(time_figures, names("time"), before, TIME_NOISE)
    # The memory coefficients that affect the allocator's peak; the others are outside of it.
    allocated = ("workspace_bytes", "activation_scale", "working_layers")
    rates, memory_errors = _fit(memory_figures, allocated, rates, 0.04)
    timed, peaked = (float(np.sum(figures.worth)) for figures in (time_figures, memory_figures))
    spreads = {
        "time_spread": spread_after(before.time_spread, time_errors, time_figures.worth),
        "memory_spread": spread_after(before.memory_spread, memory_errors, memory_figures.worth),
        "time_tail": tail_after(before.time_tail, timed),
        "time_doubt": left_after(before.time_doubt, timed),
        "memory_tail": tail_after(before.memory_tail, peaked),
    }
    return dataclasses.replace(rates, **spreads), int(sum(np.sum(runs.repeats) for runs in history))


def fit_time(history: Sequence[Runs], before: Coefficients) -> Coefficients:
    """The most probable time coefficients given trials on the same hardware; `before` is the prior."""
    timed = _Figures([(runs, runs.seconds, runs.noise) for runs in history], lambda runs, rates: seconds_of(runs.cases, rates))
    return _fit(timed, names("time"), before, TIME_NOISE)[0]


class _Figures:
    """One measured quantity of all configurations that have it, and its equation."""

    def __init__(self, figures: Sequence[tuple[Runs, Array, Array]], equation: Callable[[Runs, Coefficients], Array]) -> None:
        """`figures`: runs, the value of each configuration (NaN: not measured), and the noise of its logarithm."""
        rows = [(runs, figure, noise, np.flatnonzero(np.isfinite(figure))) for runs, figure, noise in figures]
        # Equations are evaluated only for the configurations that have the value.
        self._runs = [(dataclasses.replace(runs, cases=runs.cases.take(at)), len(at)) for runs, _, _, at in rows if len(at)]
        self._equation = equation
        self.measured = np.concatenate([np.empty(0), *(figure[at] for _, figure, _, at in rows)])
        self.noise = np.concatenate([np.empty(0), *(noise[at] for _, _, noise, at in rows)])
        self.worth = np.concatenate([np.empty(0), *(np.full(len(at), runs.worth) for runs, _, _, at in rows)])

    def predicted(self, rates: Coefficients) -> Array:
        return np.concatenate([np.broadcast_to(self._equation(runs, rates), count) for runs, count in self._runs])

    def slopes(self, names: Sequence[str], rates: Coefficients, factor: float) -> Array:
        """Derivatives of the logarithm of each prediction (rows) by the logarithm of each coefficient (columns)."""
        base = self.predicted(rates)
        more = [dataclasses.replace(rates, **{name: getattr(rates, name) * factor}) for name in names]
        changes: Array = np.stack([np.log(self.predicted(changed) / base) for changed in more], axis=1)
        return changes / float(np.log(factor))


def _fit(figures: _Figures, candidates: Sequence[str], before: Coefficients, noise: float) -> tuple[Coefficients, Array]:
    """The fitted coefficients, and the leave-one-out log(measured / predicted) of each configuration.

    The latter is e / (1 - h), h being the diagonal of J (J' J + S)^-1 J' with the derivatives J, in units of the noise, and the
    prior's precisions S: exact if the equations are linear in the logarithms [Allen 1974, PRESS].
    """
    if not len(figures.measured):
        return before, np.empty(0)
    effects = np.max(np.abs(figures.slopes(candidates, before, 10.0)), axis=0)
    # A log-log slope up to ten times the value: below it the measurements do not depend on the coefficient, which stays.
    fitted_names = [name for name, effect in zip(candidates, effects, strict=True) if effect > 0.01]
    weights = figures.worth * noise**2 / (noise**2 + figures.noise**2)
    after = fitted(fitted_names, before, figures.predicted, figures.measured, noise, weights)
    slopes = figures.slopes(fitted_names, after, 1.001) * np.sqrt(weights)[:, None] / noise
    prior_precisions = np.diag([spread(name) ** -2 for name in fitted_names])
    leverage = np.sum(slopes * np.linalg.solve(slopes.T @ slopes + prior_precisions, slopes.T).T, axis=1)
    return after, np.log(figures.measured / figures.predicted(after)) / (1 - leverage)


WORTH = 4.0
"""Number of errors to which the prior spread is equivalent: a few lucky errors do not narrow the band."""


def left_after(before: float, count: float) -> float:
    """What is left of a surcharge once so many errors are known: it counts as `WORTH` errors, and they have none."""
    return before * WORTH / (WORTH + count)


def tail_after(before: float, count: float) -> float:
    """What of a band's tail is left once so many errors are known."""
    return 1.0 + left_after(before - 1.0, count)


def spread_after(before: float, errors: Array, worth: Array | float = 1.0) -> float:
    """The standard deviation of log(measured / predicted): the root mean square, with `before` counting as `WORTH` errors.

    An outlier counts as at most three typical errors; each error as `worth`.
    """
    if not len(errors):
        return before
    bound = 3 * max(1.4826 * float(np.median(np.abs(errors))), before)
    clipped = np.clip(errors, -bound, bound)
    counts = np.broadcast_to(worth, len(clipped))
    return max(float(np.sqrt((WORTH * before**2 + np.sum(counts * clipped**2)) / (WORTH + np.sum(counts)))), 0.02)


_DIFFERENCE = 1e-4
_OUTLIER = 2.5
"""Standard deviations beyond which a residual is down-weighted."""


def fitted(
    names: Sequence[str],
    before: Coefficients,
    predicted: Callable[[Coefficients], Array],
    measured: Array,
    noise: float,
    weights: Array | None = None,
    start: Coefficients | None = None,
) -> Coefficients:
    """Return the most probable coefficients given `measured`; `start`: where the search begins, by default at `before`.

    Minimises sum(w rho(log(measured / predicted) / noise)) + sum((log c - log before) / spread)^2 over log c, with Huber's
    rho, by Levenberg-Marquardt with finite differences. Coefficients are positive, so their logarithms are fitted.

    1. Down-weight residuals beyond `_OUTLIER`, so that a broken run does not distort the fit.
    2. Solve the damped normal equations, including the prior's rows.
    3. Accept the step if the cost decreases, else increase the damping.
    """
    weights = np.ones(len(measured)) if weights is None else weights
    centre = np.log([getattr(before, name) for name in names])
    prior_spreads = np.array([spread(name) for name in names])
    target = np.log(measured)

    def at(logs: NDArray[np.float64]) -> Coefficients:
        return replace(before, **{name: float(value) for name, value in zip(names, np.exp(logs), strict=True)})

    def residuals(logs: NDArray[np.float64]) -> Array:
        return (target - np.log(predicted(at(logs)))) / noise

    def cost(logs: NDArray[np.float64], errors: Array) -> float:
        size = np.abs(errors)
        huber = np.where(size <= _OUTLIER, size**2, 2 * _OUTLIER * size - _OUTLIER**2)
        return float(np.sum(weights * huber) + np.sum(((logs - centre) / prior_spreads) ** 2))

    logs, damping = centre if start is None else np.log([getattr(start, name) for name in names]), 1e-2
    errors = residuals(logs)
    best = cost(logs, errors)
    for _ in range(15):
        slopes = np.stack(
            [(residuals(logs + _DIFFERENCE * unit) - errors) / _DIFFERENCE for unit in np.eye(len(names))], axis=1
        )
        robust = weights * np.minimum(1.0, _OUTLIER / np.maximum(np.abs(errors), 1e-12))
        gradient = slopes.T @ (robust * errors) + (logs - centre) / prior_spreads**2
        curvature = slopes.T @ (robust[:, None] * slopes) + np.diag(1 / prior_spreads**2)
        before_step = best
        for _ in range(6):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            step = np.clip(step, -1.0, 1.0)
            tried = residuals(logs + step)
            reached = cost(logs + step, tried)
            if reached < best:
                logs, errors, best, damping = logs + step, tried, reached, damping / 4
                break
            damping *= 4
        if before_step - best < 1e-4 * best:
            break
    return at(logs)
