"""Scores of strategies: shares of the best after given numbers of trials, with intervals over groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.prediction.scoring.contract import Floats
from benchmarks.search.tables.contest import MARGIN, Played
from benchmarks.search.tables.groups import Group

BUDGETS = (1, 3, 5, 8, 10, 12, 20, 40)
"""Numbers of trials after which shares are reported."""
NEAR = 0.95
"""Share of the best from which a configuration is within 5 % of it."""
FIRST = 10
"""Number of first trials among which failures are counted."""
_RESAMPLES = 2000
Document = dict[str, Any]


def group_figures(played: Sequence[Played], trials: int) -> Document:
    """Figures of one strategy on one group, over its games."""
    return {
        **_by_budget(np.array([_whole(each.shares, trials) for each in played]), trials),
        "failed_in_first_10": float(np.mean([sum(each.failed[:FIRST]) for each in played])),
        "oom_in_first_10": float(np.mean([sum(each.out_of_memory[:FIRST]) for each in played])),
        **_stops(played),
        **_decisions(played),
    }


def over_groups(figures: Sequence[Document], played: Sequence[Played], seed: int) -> Document:
    """Means over groups, null if there is none; intervals by resampling groups, not seeds [percentile bootstrap:
    Efron 1979]. `played`: the games of all these groups, whose decisions are pooled."""
    document: Document = {}
    for name in ("share", "within_5_percent"):
        by_budget = {
            budget: np.array([each[name][budget] for each in figures]) for budget in (figures[0][name] if figures else ())
        }
        document[name] = {budget: float(values.mean()) for budget, values in by_budget.items()}
        document[f"{name}_interval"] = {budget: interval(values, seed) for budget, values in by_budget.items()}
    for name in ("failed_in_first_10", "oom_in_first_10"):
        document[name] = float(np.mean([each[name] for each in figures])) if figures else None
    return document | _stops(played) | _decisions(played)


def _stops(played: Sequence[Played]) -> Document:
    """Games in which the strategy was sure to be finished, after how many trials, and how often it was right."""
    stopped = [(each.sure_after, each.shares[each.sure_after - 1]) for each in played if each.sure_after]
    right = [share * (1 + MARGIN) >= 1.0 for _, share in stopped]
    return {
        "sure_share": len(stopped) / len(played) if played else None,
        "sure_after": float(np.mean([after for after, _ in stopped])) if stopped else None,
        "sure_and_right_share": float(np.mean(right)) if right else None,
    }


def interval(values: Floats, seed: int) -> list[float] | None:
    """95 % interval of the mean of independent values; None: fewer than two values."""
    if len(values) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, len(values), (_RESAMPLES, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), [2.5, 97.5])
    return [float(low), float(high)]


def paired(one: Sequence[Document], other: Sequence[Document], seed: int) -> Document:
    """How far one is ahead of another, group by group: mean difference of shares and its interval, by budget."""
    document = {}
    for budget in one[0]["share"] if one else ():
        ahead = np.array([ours["share"][budget] - theirs["share"][budget] for ours, theirs in zip(one, other, strict=True)])
        document[budget] = {"mean": float(ahead.mean()), "interval": interval(ahead, seed)}
    return document


def oracle(group: Group, noise: float, trials: int, draws: int, seed: int) -> Document:
    """Expected results of an oracle that knows each rate, measured once with noise, and tries them in that order."""
    rates = np.array([candidate.rate for candidate in group.candidates if candidate.repeats])
    random = np.random.default_rng(seed)
    seen = np.log(rates) + noise * random.standard_normal((draws, len(rates)))
    ordered = rates[np.argsort(-seen, axis=1, kind="stable")] / rates.max()
    return _by_budget(np.array([_whole(row, trials) for row in np.maximum.accumulate(ordered, axis=1)]), trials)


def mean_oracle(oracles: Sequence[Mapping[str, Mapping[str, float]]]) -> Document:
    """The mean over groups."""
    return {
        name: {budget: float(np.mean([each[name][budget] for each in oracles])) for budget in oracles[0][name]}
        for name in (oracles[0] if oracles else ())
    }


def _by_budget(shares: Floats, trials: int) -> Document:
    """`shares`: a row for each game, a column for each trial."""
    budgets = [budget for budget in BUDGETS if budget <= trials]
    return {
        "share": {str(budget): float(shares[:, budget - 1].mean()) for budget in budgets},
        "within_5_percent": {str(budget): float((shares[:, budget - 1] >= NEAR).mean()) for budget in budgets},
    }


def _decisions(played: Sequence[Played]) -> Document:
    """Decision times, with the first separate; null if there is none."""
    later = [value for each in played for value in each.seconds[1:]]
    first = [value for each in played for value in each.seconds[:1]]
    return {
        "propose_ms_p95": float(np.percentile(later, 95) * 1e3) if later else None,
        "first_propose_ms": float(np.median(first) * 1e3) if first else None,
    }


def _whole(shares: Sequence[float] | Floats, trials: int) -> Floats:
    """Extend to the number of trials: after everything was tried the last share stays; without any trial it is 0."""
    found = np.asarray(shares, dtype=np.float64)[:trials]
    last = found[-1] if len(found) else 0.0
    return np.concatenate([found, np.full(trials - len(found), last)])
