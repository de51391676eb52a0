"""What trials told, as arrays: rates, endings, peaks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autotune.strategies.guided.described import Array, Described, Index, joined
from autotune.strategies.strategy import Score
from search_spaces.outcome import Outcome
from storage.records import TrialRecord

Flags = NDArray[np.bool_]
RAN = frozenset({Outcome.OK, Outcome.PRUNED})
"""Outcomes of trials that ran far enough to have a rate."""
SILENT = frozenset({Outcome.CANCELLED, Outcome.LOST, Outcome.PREEMPTED})
"""Outcomes that say nothing of the configuration."""
Value = Callable[[TrialRecord], float]
"""What is made the most of, positive, whether or not the trial may win; 0: not measured."""
HALF_WIDTHS = 1.96
"""Standard deviations between the mean and the edge of an interval."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observations:
    """k trials that say something."""

    described: Described
    log_rate: Array
    """(k,) Logarithm of samples/s; NaN: none was measured."""
    noise: Array
    """(k,) Standard deviation of it that the trial tells of itself; 0: not told."""
    ran: Flags
    out_of_memory: Flags
    peak: Array
    """(k,) Bytes that the allocator had given out; NaN: not measured."""
    wins: Flags
    """(k,) Whether it may be the best."""

    def __len__(self) -> int:
        return len(self.log_rate)

    @property
    def last_mesh(self) -> int | None:
        """The process groups of the last trial; None: there was none."""
        return int(self.described.mesh[-1]) if len(self) else None

    def take(self, index: Index) -> "Observations":
        """The trials of an index."""
        kept = {item.name: getattr(self, item.name)[index] for item in fields(Observations) if item.name != "described"}
        return Observations(described=self.described.take(index), **kept)

    def believing(self, described: Described, log_rate: Array) -> "Observations":
        """With further trials that are taken to have ended so: what is still running."""
        count = len(log_rate)
        more = {
            "log_rate": log_rate, "noise": np.zeros(count), "ran": np.ones(count, dtype=bool),
            "out_of_memory": np.zeros(count, dtype=bool), "peak": np.full(count, np.nan), "wins": np.ones(count, dtype=bool),
        }  # fmt: skip
        return Observations(
            described=joined(self.described, described),
            **{name: np.concatenate([getattr(self, name), values]) for name, values in more.items()},
        )


def speaking(history: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that say something of their configuration."""
    return [trial for trial in history if trial.attempts > 0 and trial.outcome is not None and trial.outcome not in SILENT]


def nothing_told(described: Described) -> Observations:
    """Before any trial; `described`: of none."""
    return Observations(
        described=described, log_rate=np.empty(0), noise=np.empty(0), ran=np.empty(0, dtype=bool),
        out_of_memory=np.empty(0, dtype=bool), peak=np.empty(0), wins=np.empty(0, dtype=bool),
    )  # fmt: skip


def told_by(trials: Sequence[TrialRecord], described: Described, value: Value, score: Score) -> Observations:
    """What these trials, which say something, told; `described`: their configurations, in the same order."""
    ran = np.array([trial.outcome in RAN for trial in trials], dtype=bool)
    return Observations(
        described=described,
        log_rate=np.array([_log_value(trial, value) for trial in trials], dtype=np.float64),
        noise=np.array([noise_of(trial) for trial in trials], dtype=np.float64),
        ran=ran,
        out_of_memory=np.array([trial.outcome is Outcome.INFEASIBLE for trial in trials], dtype=bool),
        peak=np.array([_peak(trial) for trial in trials], dtype=np.float64),
        wins=np.array([score(trial) is not None for trial in trials], dtype=bool),
    )


def _log_value(trial: TrialRecord, value: Value) -> float:
    found = value(trial) if trial.outcome in RAN else 0.0
    return float(np.log(found)) if found > 0 else float("nan")


def noise_of(trial: TrialRecord) -> float:
    """Standard deviation of the logarithm of a trial's rate that the trial tells of itself; 0: not told."""
    interval = trial.result.samples_per_second if trial.result is not None else None
    if interval is None or not 0 < interval.low <= interval.high < float("inf"):
        return 0.0
    return float(np.log(interval.high / interval.low)) / (2 * HALF_WIDTHS)


def _peak(trial: TrialRecord) -> float:
    peak = trial.result.peak_memory_bytes if trial.result is not None and trial.outcome in RAN else None
    return float(peak) if peak else float("nan")
