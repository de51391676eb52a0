"""Ranking of trials by the objective, and the Pareto front of throughput and memory with its hypervolume."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.goodput.choice import RunChoice
from autotune.request.job_fields import Objective
from search_spaces.outcome import Outcome
from storage.records import TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Orders the finished trials that can win by the objective."""

    objective: Objective = Objective.THROUGHPUT
    memory_limit_bytes: int | None = None
    """Available bytes per rank; None: unknown, so no trial exceeds it."""
    headroom: float = 0.0
    """Share of the limit that the winner must leave free."""
    allow_unstable: bool = False
    memory_share: float = 0.0
    """Objective pareto: weight of memory in the score, from 0 (only samples/s) to 1 (only memory)."""

    efficiency: Callable[[TrialRecord, float], float] | None = None
    """Returns what a search trial's configuration with these samples/s delivers per device to the answer, relative to here: on
    its cluster, and with the objective goodput after failures; None: the rates themselves are ranked."""
    choices_of: Callable[[TrialRecord, float], Sequence[RunChoice]] | None = None
    """Objective goodput: the ways to run a search trial's configuration with these samples/s, best first."""

    @property
    def capacity_bytes(self) -> float:
        """Most bytes of a rank with which a trial can win, including memory outside of torch's allocator."""
        if self.memory_limit_bytes is None:
            return float("inf")
        return self.memory_limit_bytes * (1.0 - self.headroom)

    def may_win(self, trial: TrialRecord) -> bool:
        """Whether the trial was measured, is stable, and fits with the headroom. WRONG and PRUNED never win."""
        result = trial.result
        if trial.outcome is not Outcome.OK or result is None or result.samples_per_second is None:
            return False
        if result.unstable and not self.allow_unstable:
            return False
        return result.needed_memory_bytes <= self.capacity_bytes

    def score(self, trial: TrialRecord) -> float | None:
        """The value that a search maximizes; None: the trial cannot win.

        It is samples/s, or minus the peak bytes for the memory objective. For the pareto objective, it is the weighted sum
        (1 - share) log rate - share log peak; other units only add a constant.
        """
        if not self.may_win(trial):
            return None
        if self.objective is Objective.PARETO:
            return math.log(self.value(trial)) if self.value(trial) else None
        return -float(peak_bytes(trial)) if self.objective is Objective.MEMORY else self.rate(trial)

    def rate(self, trial: TrialRecord) -> float:
        """Samples/s for ordering: the measured rate, times the efficiency."""
        measured = rate(trial)
        return measured * self.efficiency(trial, measured) if self.efficiency is not None and measured else measured

    def value(self, trial: TrialRecord) -> float:
        """The maximized quantity as a positive number, whether or not the trial can win; 0: not measured."""
        if self.objective is Objective.MEMORY:
            return 1.0 / peak_bytes(trial) if peak_bytes(trial) else 0.0
        if self.objective is Objective.PARETO and self.memory_share:
            fast, small = self.rate(trial), peak_bytes(trial)
            return float(fast ** (1 - self.memory_share) * small**-self.memory_share) if fast and small else 0.0
        return self.rate(trial)

    def ranked(self, trials: Iterable[TrialRecord]) -> list[TrialRecord]:
        """The trials that can win, best first. Ties are ordered by the other one of throughput and memory, then by number."""
        return sorted((trial for trial in trials if self.may_win(trial)), key=self._key)

    def _key(self, trial: TrialRecord) -> tuple[float, float, int]:
        fast, small = -self.rate(trial), float(peak_bytes(trial))
        return (small, fast, trial.number) if self.objective is Objective.MEMORY else (fast, small, trial.number)


def rate(trial: TrialRecord) -> float:
    """Samples/s of a trial; 0 if it was not measured."""
    measured = trial.result.samples_per_second if trial.result else None
    return measured.mean if measured else 0.0


def peak_bytes(trial: TrialRecord) -> int:
    """Peak bytes of the highest rank; 0 if it was not measured."""
    return (trial.result.peak_memory_bytes if trial.result else None) or 0


def pareto_front(
    trials: Sequence[TrialRecord], ranking: Ranking, rate_of: Callable[[TrialRecord], float] | None = None
) -> list[TrialRecord]:
    """Return the Pareto front of samples/s and memory among the trials that can win, fastest first.

    Args:
        trials: each configuration once.
        ranking: decides which trials can win.
        rate_of: samples/s of a trial; None: its own measurement, without repeats of its configuration.
    """
    rate_of = rate_of or ranking.rate
    front: list[TrialRecord] = []
    least = float("inf")
    rates = {trial.number: rate_of(trial) for trial in trials if ranking.may_win(trial)}
    able = (trial for trial in trials if trial.number in rates)
    for trial in sorted(able, key=lambda t: (-rates[t.number], peak_bytes(t), t.number)):
        if peak_bytes(trial) < least:
            front.append(trial)
            least = peak_bytes(trial)
    return front


BEYOND = 2.0
"""Memory of the reference point, as a multiple of the baseline's peak. Points above it do not count."""


def hypervolume(points: Sequence[tuple[float, float]], most_memory: float) -> float:
    """Return the area that the points (samples/s, peak bytes) dominate, with the reference point 0 samples/s and `most_memory`
    [Zitzler 1999].

    1. Go through the points from the fastest; each adds the strip of memory that no faster point covers.
    """
    area, edge = 0.0, most_memory
    for fast, small in sorted(points, key=lambda point: (-point[0], point[1])):
        if small < edge:
            area += fast * (edge - small)
            edge = small
    return area


def front_points(document: dict[str, Any]) -> list[tuple[float, float]]:
    """Return (samples/s, peak bytes) of each alternative of a best-config document."""
    return [_point(entry["measured"]) for entry in document["alternatives"]]


def front_over_baseline(document: dict[str, Any]) -> float | None:
    """Return the front's hypervolume relative to that of only the baseline; above 1: the front is wider; None: no baseline.

    The reference point is 0 samples/s and `BEYOND` times the baseline's peak, so the baseline's own hypervolume is always its
    rate times its peak.
    """
    if not document["baseline"]:
        return None
    rate, peak = _point(document["baseline"]["measured"])
    if not rate or not peak:
        return None
    most = BEYOND * peak
    return hypervolume(front_points(document), most) / hypervolume([(rate, peak)], most)


def _point(measured: dict[str, Any]) -> tuple[float, float]:
    peak = max((rank["total"] or 0 for rank in measured["peak_memory_bytes"]), default=0)
    return measured["samples_per_second"]["mean"], float(peak)
