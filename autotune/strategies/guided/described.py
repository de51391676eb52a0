"""Arrays for guided search: configurations with their predictions and features, and results of trials."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autotune.strategies.strategy import UNINFORMATIVE, Candidates, Score
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Described:
    """Predictions for n configurations. Contains no result of a trial of these configurations."""

    log_rate: Array
    """(n,) Logarithm of the samples/s that the equations predict, or of another maximised value (`Guide.value`)."""
    learned: Array
    """(n,) Correction learned from earlier jobs' measurements; 0 without any."""
    penalty: Array
    """(n,) Penalty for settings that depart from the base, whose full cost no equation counts."""
    features: Array
    """(n, f) Features that distinguish configurations; degrees and sizes in doublings."""
    needed: Array
    """(n,) Bytes of the fullest rank."""
    outside: Array
    """(n,) The part of these bytes outside of torch's allocator."""
    tags: Array
    """(n, t) Bytes by tag."""
    room: Array
    """(n,) Bytes that a rank may use."""
    memory_spread: Array
    """(n,) Standard deviation of the logarithm of measured / predicted bytes."""
    kind: Index
    """(n,) Equal if bytes are comparable tag by tag: equal buckets, same side of one micro-batch per step."""
    cost: Array
    """(n,) Predicted seconds of a trial; the same for all if unknown."""
    mesh: Index
    """(n,) Equal if a trial can reuse the process groups of the other."""

    def __len__(self) -> int:
        return len(self.log_rate)

    def part(self, places: slice) -> "Described":
        """A contiguous range of configurations, without a copy."""
        return Described(**{item.name: getattr(self, item.name)[places] for item in fields(Described)})

    def take(self, index: Index) -> "Described":
        """The configurations at these indices."""
        return Described(**{item.name: getattr(self, item.name)[index] for item in fields(Described)})


def joined(first: Described, second: Described) -> Described:
    """Concatenate both, in this order."""
    return Described(
        **{item.name: np.concatenate([getattr(first, item.name), getattr(second, item.name)]) for item in fields(Described)}
    )


class CandidatePool(Protocol):
    """Candidates with their predictions."""

    @property
    def described(self) -> Described:
        """All of them, in a fixed order."""
        ...

    def config(self, position: int) -> TrialConfig:
        """The candidate at a position in that order."""
        ...

    def places(self, configs: Sequence[TrialConfig]) -> Index:
        """Positions of these configurations; -1: not in the pool."""
        ...


class CandidatePools:
    """The pools of a forecaster, each created once."""

    def __init__(self, forecaster: "Forecaster") -> None:
        self.forecaster = forecaster
        self._made: dict[str, CandidatePool] = {}

    def of(self, candidates: Candidates) -> CandidatePool:
        """The pool of these candidates."""
        if candidates.hash not in self._made:
            self._made[candidates.hash] = self.forecaster.pool(candidates)
        return self._made[candidates.hash]


class Forecaster(Protocol):
    """Predicts for one model on one cluster. Results depend only on the arguments and on the constructor's arguments."""

    def pool(self, candidates: Candidates) -> CandidatePool:
        """The candidates, or those that are predicted to be worth a trial."""
        ...

    def after(self, history: Sequence[TrialRecord]) -> "Forecaster":
        """A forecaster with coefficients refined by these trials of the same job; or this one."""
        ...

    def around(self, best: TrialConfig, log_rate: float) -> Sequence[TrialConfig]:
        """Configurations outside the pool that may beat the best, which was measured at that rate."""
        ...

    def describe(self, configs: Sequence[TrialConfig]) -> Described:
        """Predictions for any configurations, in the pool or not; there may be none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What predicting strategies need besides the score."""

    forecaster: Forecaster
    value: Callable[[TrialRecord], float]
    """What the forecaster predicts: positive, also for trials that cannot win; 0: not measured."""


Flags = NDArray[np.bool_]
RAN = frozenset({Outcome.OK, Outcome.PRUNED})
"""Outcomes of trials that ran far enough to have a rate."""
Value = Callable[[TrialRecord], float]
"""The maximised value, positive, whether or not the trial can win; 0: not measured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observations:
    """k informative trials."""

    described: Described
    log_rate: Array
    """(k,) Logarithm of samples/s; NaN: not measured."""
    noise: Array
    """(k,) Its standard deviation as measured within the trial; 0: unknown."""
    ran: Flags
    out_of_memory: Flags
    peak: Array
    """(k,) Peak bytes allocated; NaN: not measured."""
    wins: Flags
    """(k,) Whether the trial can be the best."""

    def __len__(self) -> int:
        return len(self.log_rate)

    @property
    def last_mesh(self) -> int | None:
        """The process groups of the last trial; None: there was no trial."""
        return int(self.described.mesh[-1]) if len(self) else None

    def take(self, index: Index) -> "Observations":
        """The trials at these indices."""
        columns = {item.name: getattr(self, item.name)[index] for item in fields(Observations) if item.name != "described"}
        return Observations(described=self.described.take(index), **columns)

    def with_assumed(self, described: Described, log_rate: Array) -> "Observations":
        """Add further trials with assumed results: those still running."""
        count = len(log_rate)
        more = {
            "log_rate": log_rate, "noise": np.zeros(count), "ran": np.ones(count, dtype=bool),
            "out_of_memory": np.zeros(count, dtype=bool), "peak": np.full(count, np.nan), "wins": np.ones(count, dtype=bool),
        }  # fmt: skip
        return Observations(
            described=joined(self.described, described),
            **{name: np.concatenate([getattr(self, name), values]) for name, values in more.items()},
        )


def select_informative(history: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that are informative about their configuration."""
    return [
        trial for trial in history if trial.attempts > 0 and trial.outcome is not None and trial.outcome not in UNINFORMATIVE
    ]


def no_observations(described: Described) -> Observations:
    """The state before any trial; `described`: an empty one."""
    return Observations(
        described=described, log_rate=np.empty(0), noise=np.empty(0), ran=np.empty(0, dtype=bool),
        out_of_memory=np.empty(0, dtype=bool), peak=np.empty(0), wins=np.empty(0, dtype=bool),
    )  # fmt: skip


def observe(trials: Sequence[TrialRecord], described: Described, value: Value, score: Score) -> Observations:
    """Results of these informative trials; `described`: their configurations, in the same order."""
    ran = np.array([trial.outcome in RAN for trial in trials], dtype=bool)
    measured = [value(trial) if trial.outcome in RAN else 0.0 for trial in trials]
    return Observations(
        described=described,
        log_rate=np.array([np.log(figure) if figure > 0 else np.nan for figure in measured], dtype=np.float64),
        noise=np.array([noise_of(trial) for trial in trials], dtype=np.float64),
        ran=ran,
        out_of_memory=np.array([trial.outcome is Outcome.INFEASIBLE for trial in trials], dtype=bool),
        peak=np.array([_peak(trial) for trial in trials], dtype=np.float64),
        wins=np.array([score(trial) is not None for trial in trials], dtype=bool),
    )


def noise_of(trial: TrialRecord) -> float:
    """Standard deviation of the logarithm of a trial's rate, as measured within the trial; 0: unknown."""
    interval = trial.result.samples_per_second if trial.result is not None else None
    if interval is None or not 0 < interval.low <= interval.high < float("inf"):
        return 0.0
    return float(np.log(interval.high / interval.low)) / (2 * 1.96)


def _peak(trial: TrialRecord) -> float:
    peak = trial.result.peak_memory_bytes if trial.result is not None and trial.outcome in RAN else None
    return float(peak) if peak else float("nan")
