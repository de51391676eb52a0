"""Quality of the predicted order of a group's configurations, and the value of the predicted best."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.planning.depth import spearman
from benchmarks.prediction.scoring.contract import Flags, Forecast
from benchmarks.prediction.scoring.facts import Candidate, Facts, GroupKey
from benchmarks.prediction.scoring.outcomes import Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScore:
    """The scores of a group with enough timed candidates."""

    source: str
    rank_group: str
    rows: int
    """Rows of its candidates, including failed ones."""
    candidates: int
    timed: int
    """Candidates that ran and have a time."""
    failed: int
    """Candidates that ran out of memory, or failed for an unstated reason."""
    spearman: float | None
    """Rank correlation of predicted and measured throughput over the timed candidates; None: one of them does not vary."""
    predicted_best_share: float
    """Measured throughput of the predicted best / the best measured one; 0 if the predicted best failed."""
    share_among_timed: float
    """The same with only the timed candidates, ignoring out-of-memory verdicts."""
    predicted_best: str
    """The row_id of the predicted best."""
    predicted_best_fate: Fate
    measured_best: str
    """The row_id of the best measured."""

    @property
    def regret(self) -> float:
        """The loss from choosing the predicted best."""
        return 1 - self.predicted_best_share


@dataclass(frozen=True, slots=True, kw_only=True)
class RankScore:
    """Aggregates over groups; None: there are none."""

    spearman_median: float | None
    predicted_best_share_mean: float | None
    predicted_best_share_min: float | None
    share_among_timed_mean: float | None
    regret_mean: float | None
    groups: int


def timed_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that ran and have a time."""
    return [candidate for candidate in candidates if candidate.repeats]


def group_scores(facts: Facts, forecast: Forecast, scored: Flags, min_timed: int) -> dict[GroupKey, GroupScore]:
    """Score each group with enough timed candidates; a candidate counts if all of its rows are scored."""
    usable = scored & np.isfinite(forecast.step_seconds)
    scores = {}
    for key, candidates in facts.groups.items():
        known = [candidate for candidate in candidates if usable[list(candidate.rows)].all()]
        # A row that ran without a time provides neither a rate nor a failure.
        known = [candidate for candidate in known if candidate.repeats or candidate.fate is not Fate.RAN]
        if len(timed_candidates(known)) >= max(min_timed, 1):
            scores[key] = _group_score(facts, forecast, key, known)
    return scores


def rank_score(groups: Sequence[GroupScore]) -> RankScore:
    """Median correlation and mean share."""
    correlations = [group.spearman for group in groups if group.spearman is not None]
    shares = [group.predicted_best_share for group in groups]
    return RankScore(
        spearman_median=float(np.median(correlations)) if correlations else None,
        predicted_best_share_mean=float(np.mean(shares)) if shares else None,
        predicted_best_share_min=min(shares, default=None),
        share_among_timed_mean=float(np.mean([group.share_among_timed for group in groups])) if groups else None,
        regret_mean=1 - float(np.mean(shares)) if shares else None,
        groups=len(groups),
    )


def _group_score(facts: Facts, forecast: Forecast, key: GroupKey, candidates: Sequence[Candidate]) -> GroupScore:
    timed = timed_candidates(candidates)
    predicted = {id(candidate): _predicted_rate(facts, forecast, candidate) for candidate in candidates}
    picked = _pick(forecast, candidates, predicted)
    picked_among_timed = max(timed, key=lambda candidate: predicted[id(candidate)])
    best = max(timed, key=lambda candidate: candidate.rate)
    return GroupScore(
        source=key[0],
        rank_group=key[1],
        rows=sum(len(candidate.rows) for candidate in candidates),
        candidates=len(candidates),
        timed=len(timed),
        failed=len(candidates) - len(timed),
        spearman=spearman(np.array([predicted[id(each)] for each in timed]), np.array([each.rate for each in timed])),
        predicted_best_share=picked.rate / best.rate if picked.repeats else 0.0,
        share_among_timed=picked_among_timed.rate / best.rate,
        predicted_best=facts.rows[picked.rows[0]].row_id,
        predicted_best_fate=picked.fate,
        measured_best=facts.rows[best.rows[0]].row_id,
    )


def _predicted_rate(facts: Facts, forecast: Forecast, candidate: Candidate) -> float:
    # Repeats have equal predictions: the first row represents all.
    first = candidate.rows[0]
    return float(facts.work[first] / forecast.step_seconds[first])


def _pick(forecast: Forecast, candidates: Sequence[Candidate], predicted: dict[int, float]) -> Candidate:
    """The fastest candidate predicted feasible; if there is none, the one that needs the least memory."""
    feasible = [candidate for candidate in candidates if not forecast.out_of_memory[candidate.rows[0]]]
    if feasible:
        return max(feasible, key=lambda candidate: predicted[id(candidate)])
    return min(candidates, key=lambda candidate: float(np.nan_to_num(forecast.memory_bytes[candidate.rows[0]], nan=np.inf)))
