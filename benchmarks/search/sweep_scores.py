"""Scores of sweeps' winners, relative to the best of the reference grid and to each other."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.common.paired_statistics import Estimate, estimate, paired_gain
from benchmarks.search.sweep_play import Sweep
from search_spaces.trial_config import TrialConfig

NEAR = 0.95
"""A configuration with at least this share of the best rate is within 5 % of it."""
GUIDED = "guided"
Truth = Callable[[TrialConfig | None], float]
"""Best known samples/s of a configuration; for None (no winner) the slowest of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One contestant over its seeds."""

    contestant: str
    seeds: int
    below_best: Estimate
    """Share by which its winner is slower than the fastest of the grid's best ten."""
    below_ten: Estimate
    """The same relative to the best ten's mean."""
    worst: float
    """`below_best` of its worst seed."""
    lead: Estimate | None
    """Relative lead of guided's winner, seed by seed; None for guided itself."""
    trials_until_near: tuple[int | None, ...]
    """By seed: trials up to the first one within 5 % of the best; None: there is none."""
    seconds: float
    """Mean seconds of a sweep."""

    @property
    def median_trials(self) -> float:
        """Median of `trials_until_near`; infinite if most seeds have none."""
        return statistics.median(float("inf") if count is None else count for count in self.trials_until_near)

    @property
    def found(self) -> int:
        """Seeds with a trial within 5 % of the best."""
        return sum(count is not None for count in self.trials_until_near)


def score(sweeps: Sequence[Sweep], truth: Truth, top: Sequence[TrialConfig]) -> list[Score]:
    """Every contestant's figures; guided first, then the nearest to the best.

    Raises:
        ValueError: there is no best to compare with.
    """
    if not top:
        raise ValueError("the grid has no best; measure it first")
    rates = [truth(config) for config in top]
    names = dict.fromkeys(sweep.contestant for sweep in sweeps)
    by_seed = {name: {sweep.seed: sweep for sweep in sweeps if sweep.contestant == name} for name in names}
    scores = [
        _score(name, by_seed[name], by_seed.get(GUIDED, {}), truth, max(rates), statistics.fmean(rates)) for name in names
    ]
    return sorted(scores, key=lambda each: (each.contestant != GUIDED, each.below_best.mean))


def trials_until(sweep: Sweep, truth: Truth, rate: float) -> int | None:
    """Number of trials until one was at least that fast; None: none was."""
    for number, tried in enumerate(sweep.trials, start=1):
        if truth(TrialConfig().replace(tried.config)) >= rate:
            return number
    return None


def _score(name: str, sweeps: dict[int, Sweep], guided: dict[int, Sweep], truth: Truth, best: float, ten: float) -> Score:
    winners = {seed: truth(sweep.best) for seed, sweep in sweeps.items()}
    shared = sorted(sweeps.keys() & guided.keys()) if name != GUIDED else []
    ours = [truth(guided[seed].best) for seed in shared]
    return Score(
        contestant=name,
        seeds=len(sweeps),
        below_best=estimate([1 - rate / best for rate in winners.values()]),
        below_ten=estimate([1 - rate / ten for rate in winners.values()]),
        worst=max(1 - rate / best for rate in winners.values()),
        lead=paired_gain(ours, [winners[seed] for seed in shared]) if shared else None,
        trials_until_near=tuple(trials_until(sweep, truth, NEAR * best) for sweep in sweeps.values()),
        seconds=statistics.fmean(sweep.seconds for sweep in sweeps.values()),
    )
