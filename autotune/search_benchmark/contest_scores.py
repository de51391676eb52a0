"""What strategies reach: shares of the best after so many trials, with intervals over groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autotune.search_benchmark.contest import Played
from autotune.search_benchmark.groups import Group
from autotune.validation.contract import Floats

BUDGETS = (1, 3, 5, 8, 10, 12, 20, 40)
"""Trials after which shares are told."""
NEAR = 0.95
"""Share of the best from which a configuration is within 5 % of it."""
FIRST = 10
"""Trials among which failures are counted."""
_RESAMPLES = 2000
Document = dict[str, Any]


def group_figures(played: Sequence[Played], trials: int) -> Document:
    """Of one strategy on one group, over its seeds."""
    shares = np.array([_whole(each.shares, trials) for each in played])
    told = [budget for budget in BUDGETS if budget <= trials]
    seconds = [value for each in played for value in each.seconds]
    return {
        "share": {str(budget): float(shares[:, budget - 1].mean()) for budget in told},
        "within_5_percent": {str(budget): float((shares[:, budget - 1] >= NEAR).mean()) for budget in told},
        "failed_in_first_10": float(np.mean([sum(each.failed[:FIRST]) for each in played])),
        "oom_in_first_10": float(np.mean([sum(each.out_of_memory[:FIRST]) for each in played])),
        "propose_ms_p95": float(np.percentile(seconds, 95) * 1e3) if seconds else None,
        "first_propose_ms": float(np.median([each.first_seconds for each in played]) * 1e3),
    }


def over_groups(figures: Sequence[Document], seed: int) -> Document:
    """Means over groups; intervals by drawing groups, not seeds, anew [bootstrap percentiles: Efron 1979]."""
    told: Document = {}
    for name in ("share", "within_5_percent"):
        budgets = figures[0][name]
        told[name] = {budget: float(np.mean([each[name][budget] for each in figures])) for budget in budgets}
    told["share_interval"] = {
        budget: interval(np.array([each["share"][budget] for each in figures]), seed) for budget in figures[0]["share"]
    }
    for name in ("failed_in_first_10", "oom_in_first_10"):
        told[name] = float(np.mean([each[name] for each in figures]))
    for name in ("propose_ms_p95", "first_propose_ms"):
        known = [each[name] for each in figures if each[name] is not None]
        told[name] = float(np.max(known)) if known else None
    return told


def interval(values: Floats, seed: int) -> list[float]:
    """95 % interval of the mean of independent values."""
    drawn = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return [float(low), float(high)]


def paired(one: Mapping[str, Document], other: Mapping[str, Document], seed: int) -> Document:
    """How far `one` is ahead of `other`, group by group: mean difference of shares and its interval, by budget."""
    names = list(one)
    told = {}
    for budget in one[names[0]]["share"]:
        ahead = np.array([one[name]["share"][budget] - other[name]["share"][budget] for name in names])
        told[budget] = {"mean": float(ahead.mean()), "interval": interval(ahead, seed)}
    return told


def oracle(group: Group, noise: float, trials: int, draws: int, seed: int) -> Document:
    """What one expects to find who knows each rate, measured once with noise, and tries them in that order."""
    rates = np.array([candidate.rate for candidate in group.candidates if candidate.repeats])
    random = np.random.default_rng(seed)
    seen = np.log(rates) + noise * random.standard_normal((draws, len(rates)))
    ordered = rates[np.argsort(-seen, axis=1, kind="stable")] / rates.max()
    best = np.maximum.accumulate(ordered, axis=1)
    shares = np.array([_whole(row, trials) for row in best])
    told = [budget for budget in BUDGETS if budget <= trials]
    return {
        "share": {str(budget): float(shares[:, budget - 1].mean()) for budget in told},
        "within_5_percent": {str(budget): float((shares[:, budget - 1] >= NEAR).mean()) for budget in told},
    }


def _whole(shares: Sequence[float] | Floats, trials: int) -> Floats:
    """As many as there are trials: who has tried everything stays where he is."""
    found = np.asarray(shares, dtype=np.float64)
    return np.concatenate([found, np.full(trials - len(found), found[-1])]) if len(found) < trials else found[:trials]
