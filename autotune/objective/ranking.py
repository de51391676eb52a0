"""What best means: ranking, the finalists, the front of throughput and memory."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autotune.request.request import Objective
from search_spaces.outcome import Outcome
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Orders finished trials by the objective, among those that may win."""

    objective: Objective = Objective.THROUGHPUT
    memory_limit_bytes: int | None = None
    """Bytes per rank that there are; None: not known, so that nothing is over it."""
    headroom: float = 0.0
    """Share of the limit that the winner leaves free."""
    allow_unstable: bool = False
    memory_share: float = 0.0
    """Objective pareto: of memory in the score, from 0 (samples/s alone) to 1 (memory alone)."""

    efficiency: Callable[[TrialConfig], float] | None = None
    """Of a configuration: a device's rate on the cluster that the answer is for over that here; None: it is the trials' own."""

    @property
    def capacity_bytes(self) -> float:
        """Most bytes of a rank with which a trial may win, what is outside of torch's allocator counted."""
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
        """What a search makes the most of; None: the trial cannot win.

        Samples/s, or minus the peak's bytes where memory is the objective. Where the front is, the weighted sum of
        (1 - share) log rate and -share log peak, which changes by a constant with the units of either.
        """
        if not self.may_win(trial):
            return None
        if self.objective is Objective.PARETO:
            return math.log(self.value(trial)) if self.value(trial) else None
        return -float(peak_bytes(trial)) if self.objective is Objective.MEMORY else self.rate(trial)

    def rate(self, trial: TrialRecord) -> float:
        """Samples/s by which trials are ordered: as measured, times the efficiency where the answer is for another cluster."""
        measured = rate(trial)
        return measured * self.efficiency(trial.config) if self.efficiency is not None and measured else measured

    def value(self, trial: TrialRecord) -> float:
        """What is made the most of, positive, whether or not the trial may win; 0: not measured."""
        if self.objective is Objective.MEMORY:
            return 1.0 / peak_bytes(trial) if peak_bytes(trial) else 0.0
        if self.objective is Objective.PARETO and self.memory_share:
            fast, small = self.rate(trial), peak_bytes(trial)
            return float(fast ** (1 - self.memory_share) * small**-self.memory_share) if fast and small else 0.0
        return self.rate(trial)

    def ranked(self, trials: Iterable[TrialRecord]) -> list[TrialRecord]:
        """The trials that may win, best first; equals by the other of throughput and memory, then by number."""
        return sorted((trial for trial in trials if self.may_win(trial)), key=self._key)

    def _key(self, trial: TrialRecord) -> tuple[float, float, int]:
        fast, small = -self.rate(trial), float(peak_bytes(trial))
        return (small, fast, trial.number) if self.objective is Objective.MEMORY else (fast, small, trial.number)


def rate(trial: TrialRecord) -> float:
    """Samples/s of a measured trial; 0 where it was not measured."""
    measured = trial.result.samples_per_second if trial.result else None
    return measured.mean if measured else 0.0


def peak_bytes(trial: TrialRecord) -> int:
    """Peak of the highest rank; 0 where it was not measured."""
    return (trial.result.peak_memory_bytes if trial.result else None) or 0


def pareto_front(
    trials: Sequence[TrialRecord], ranking: Ranking, rate_of: Callable[[TrialRecord], float] | None = None
) -> list[TrialRecord]:
    """The trials that may win and that no other beats in samples/s and memory at once, fastest first.

    Args:
        trials: each configuration once.
        ranking: what may win.
        rate_of: samples/s of a trial; None: what it measured itself, whatever repeats of its configuration did.
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
