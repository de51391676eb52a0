"""The report of a validation as a JSON document: figures, or null if there is none; never NaN."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autotune.knowledge.table import MeasurementTable, RowProblem
from benchmarks.prediction.scoring.ceiling import Ceiling, Noise, ceilings, noises
from benchmarks.prediction.scoring.configurations import problems_of
from benchmarks.prediction.scoring.contract import Flags, Forecast, Predictor
from benchmarks.prediction.scoring.facts import PATHOLOGICAL, Facts, GroupKey, gather_facts
from benchmarks.prediction.scoring.folds import DRAWS, Calibration
from benchmarks.prediction.scoring.forecasts import Forecasts, Protocol, make_forecasts
from benchmarks.prediction.scoring.outcomes import NO_LABELS, Fate, Labels
from benchmarks.prediction.scoring.ranking import GroupScore, group_scores, rank_score
from benchmarks.prediction.scoring.reliability import reliability
from benchmarks.prediction.scoring.scores import memory_score, oom_score, time_score

Document = dict[str, Any]
OTHER_NOISES = (0.05, 0.08, 0.12)
"""Additional noise levels for ceilings, since a source's own is often assumed."""
FORMAT = 1

RULES = (
    "time error: |predicted / measured - 1| of step seconds, from tokens/s, else samples/s, else the stated step time",
    f"pathological: a row slower than 1/{PATHOLOGICAL:.0f} of its group's fastest is ranked, but left out of time errors",
    "out of memory: positives are rows that ran out of memory, or that a label calls certain or likely; negatives ran",
    "rows of one configuration in a group are one candidate: it ran if any ran, its throughput the median of those",
    "predicted best: the fastest predicted of a group's candidates except those predicted out of memory; worth 0 if it failed",
    "candidates that failed for another reason than memory (error, or according to a label) are not offered",
    "rows whose micro-batch, accumulation and data-parallel size contradict the batch count only for memory",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Ceilings:
    """Ceilings of the groups ranked in any draw."""

    noise: Mapping[str, Noise]
    own: Mapping[GroupKey, Ceiling]
    at_noise: Mapping[float, Mapping[GroupKey, Ceiling]]


def validate(table: MeasurementTable, predictor: Predictor, protocol: Protocol, labels: Labels = NO_LABELS) -> Document:
    """Score a predictor on a table."""
    facts = gather_facts(table.rows, labels)
    forecasts = make_forecasts(facts, predictor, protocol)
    groups = [group_scores(facts, draw.forecast, draw.scored, protocol.min_timed) for draw in forecasts.draws]
    keys = [key for key in facts.groups if any(key in scored for scored in groups)]
    limits = _ceilings(facts, keys, protocol)
    document = {
        "format": FORMAT,
        "table": str(table.path),
        **_how(protocol, facts, forecasts),
        "rows": _row_counts(table, facts, forecasts),
        "rows_by_source": {
            source: {"read": len(positions), "scored": int(_scored(forecasts)[positions].sum())}
            for source, positions in facts.sources().items()
        },
        "summary": _figures(facts, forecasts, groups, limits, None),
        "by_source": {source: _figures(facts, forecasts, groups, limits, source) for source in facts.sources()},
        "reliability": reliability(facts, forecasts.draws[0].forecast, forecasts.draws[0].scored),
        "groups": [_group(key, [scored[key] for scored in groups if key in scored], limits) for key in keys],
        "noise": {source: asdict(noise) for source, noise in limits.noise.items()},
        "skipped": [asdict(skip) for skip in sorted((*table.skipped, *forecasts.skipped), key=lambda skip: skip.line)],
        "problems": [asdict(problem) for problem in (*problems_of(table), *labels.problems, *_label_problems(facts, labels))],
        "merged": _merged(facts),
        "rules": list(RULES),
    }
    plain: Document = _plain(document)
    return plain


def _how(protocol: Protocol, facts: Facts, forecasts: Forecasts) -> Document:
    few = protocol.calibrate is Calibration.FEW_ROWS
    count = len(facts.rows)
    note = None
    if forecasts.in_sample:
        note = f"in-sample: the shipped coefficients were fitted on {forecasts.in_sample} of these {count} rows"
    return {
        "calibrate": str(protocol.calibrate),
        "calibration_rows": protocol.calibration_rows if few else None,
        "draws": DRAWS if few else 1,
        "seed": protocol.seed,
        "min_timed": protocol.min_timed,
        "in_sample": bool(forecasts.in_sample),
        "in_sample_rows": forecasts.in_sample,
        "in_sample_note": note,
        "predicted_by_priors_alone": forecasts.priors_only,
    }


def _row_counts(table: MeasurementTable, facts: Facts, forecasts: Forecasts) -> Document:
    return {
        "in_table": len(table.rows) + len(table.skipped),
        "read": len(facts.rows),
        "scored": int(_scored(forecasts).sum()),
        "with_time": int(np.isfinite(facts.seconds).sum()),
        "with_memory": int(np.isfinite(facts.bytes).sum()),
        "fates": {str(fate): int(facts.fate_is(fate).sum()) for fate in Fate},
        "contradict_their_batch": sum(row.batch_problem is not None for row in facts.rows),
    }


def _scored(forecasts: Forecasts) -> Flags:
    """Rows that are scored in any draw."""
    scored: Flags = np.any([draw.scored for draw in forecasts.draws], axis=0)
    return scored


def _figures(
    facts: Facts, forecasts: Forecasts, groups: Sequence[Mapping[GroupKey, GroupScore]], limits: _Ceilings, source: str | None
) -> Document:
    """The four scores over all rows, or over a source's; with several draws the median of each figure."""
    ours = np.array([source is None or row.source == source for row in facts.rows], dtype=bool)
    found = []
    for draw, scored in zip(forecasts.draws, groups, strict=True):
        ranked = {key: score for key, score in scored.items() if source is None or key[0] == source}
        scores = {name: asdict(score(facts, draw.forecast, draw.scored & ours)) for name, score in _SCORES.items()}
        scores["rank"] = asdict(rank_score(list(ranked.values()))) | _rank_ceilings(list(ranked), limits)
        found.append(scores)
    merged: Document = _median(found)
    return merged


_SCORES: Mapping[str, Callable[[Facts, Forecast, Flags], Any]] = {
    "oom": oom_score,
    "memory": memory_score,
    "time": time_score,
}


def _rank_ceilings(keys: Sequence[GroupKey], limits: _Ceilings) -> Document:
    own = _over_groups([limits.own[key] for key in keys])
    others = {f"{noise:g}": _over_groups([found[key] for key in keys]) for noise, found in limits.at_noise.items()}
    assumed = any(limits.noise[key[0]].assumed for key in keys)
    return {"ceiling": own, "ceiling_assumes_noise": assumed, "ceiling_at_noise": others}


def _over_groups(found: Sequence[Ceiling]) -> Document:
    correlations = [ceiling.spearman for ceiling in found if ceiling.spearman is not None]
    return {
        "predicted_best_share_mean": np.mean([each.predicted_best_share for each in found]) if found else None,
        "spearman_median": np.median(correlations) if correlations else None,
    }


def _ceilings(facts: Facts, keys: Sequence[GroupKey], protocol: Protocol) -> _Ceilings:
    noise = noises(facts, protocol.assumed_noise)
    at_noise = {}
    for deviation in OTHER_NOISES:
        same = {source: Noise(deviation=deviation, repeated=0, assumed=True) for source in noise}
        at_noise[deviation] = ceilings(facts, keys, same, protocol.seed)
    return _Ceilings(noise=noise, own=ceilings(facts, keys, noise, protocol.seed), at_noise=at_noise)


def _group(key: GroupKey, scores: Sequence[GroupScore], limits: _Ceilings) -> Document:
    figures: Document = _median([asdict(score) | {"regret": score.regret} for score in scores])
    own = limits.own[key]
    return figures | {
        "source": key[0],
        "rank_group": key[1],
        "ceiling": own.predicted_best_share,
        "spearman_ceiling": own.spearman,
    }


def _merged(facts: Facts) -> list[Document]:
    """Candidates with several rows."""
    return [
        {
            "rank_group": key[1],
            "rows": [facts.rows[position].row_id for position in candidate.rows],
            "lines": [facts.rows[position].line for position in candidate.rows],
            "outcomes": [str(facts.rows[position].outcome) for position in candidate.rows],
            "counts_as": str(candidate.fate),
        }
        for key, candidates in facts.groups.items()
        for candidate in candidates
        if len(candidate.rows) > 1
    ]


def _label_problems(facts: Facts, labels: Labels) -> list[RowProblem]:
    strangers = set(labels.fates).difference(row.row_id for row in facts.rows)
    if not strangers:
        return []
    return [RowProblem(line=1, row_id="", problem=f"labels: {len(strangers)} of {len(labels.fates)} match no row of the table")]


def _median(found: Sequence[Any]) -> Any:
    """Merge dictionaries of figures into one of medians; for non-numeric values, the most frequent."""
    if not found:
        return None
    if len(found) == 1:
        return found[0]
    if isinstance(found[0], dict):
        return {key: _median([each[key] for each in found]) for key in found[0]}
    known = [value for value in found if value is not None]
    if not known:
        return None
    if isinstance(known[0], bool | str):
        return max(known, key=known.count)
    middle = float(np.median(known))
    counted = all(isinstance(value, int) for value in known) and middle.is_integer()
    return int(middle) if counted else middle


def _plain(value: Any) -> Any:
    """Convert NumPy's types; a non-finite number becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
