"""Errors of times and memory, and the out-of-memory verdict compared with the runs."""

from dataclasses import dataclass

import numpy as np

from benchmarks.prediction.scoring.contract import Flags, Floats, Forecast
from benchmarks.prediction.scoring.facts import Facts
from benchmarks.prediction.scoring.outcomes import Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeScore:
    """Errors are |predicted / measured - 1|; None: no row has both."""

    median_abs_error: float | None
    mean_abs_error: float | None
    max_abs_error: float | None
    bias: float | None
    """Median of predicted / measured - 1: above 0, too slow."""
    inside_interval: float | None
    """Share of rows whose time lies between the predictor's low and high."""
    rows: int
    pathological: int
    """Rows with a time that are excluded because they are slower than a fiftieth of their group's fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryScore:
    """Errors are |predicted / measured - 1|; None: no row has both."""

    median_abs_error: float | None
    p95_abs_error: float | None
    max_abs_error: float | None
    bias: float | None
    """Median of predicted / measured - 1: above 0, too much."""
    inside_interval: float | None
    """Share of rows whose memory lies between the predictor's low and high."""
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OomScore:
    """Positives ran out of memory, according to the row or a label; negatives ran. Others do not count."""

    recall: float | None
    """Share of the positives that is predicted out of memory; None: there are no positives."""
    precision: float | None
    """Share of the predicted out-of-memory rows that are positive; None: none is predicted."""
    false_alarm_share: float | None
    """Share of the negatives that is predicted out of memory."""
    rows: int
    out_of_memory: int
    """Positives."""
    missed: int
    """Positives that are predicted feasible."""
    false_alarms: int
    """Negatives that are predicted out of memory."""


def time_score(facts: Facts, forecast: Forecast, scored: Flags) -> TimeScore:
    """Score the rows with a measured and a predicted time."""
    timed = scored & np.isfinite(facts.seconds) & np.isfinite(forecast.step_seconds)
    used = timed & ~facts.pathological
    error = forecast.step_seconds[used] / facts.seconds[used] - 1
    inside = _inside(facts.seconds[used], forecast.step_seconds_low[used], forecast.step_seconds_high[used])
    return TimeScore(
        median_abs_error=middle(np.abs(error)),
        mean_abs_error=average(np.abs(error)),
        max_abs_error=largest(np.abs(error)),
        bias=middle(error),
        inside_interval=inside,
        rows=int(used.sum()),
        pathological=int((timed & facts.pathological).sum()),
    )


def memory_score(facts: Facts, forecast: Forecast, scored: Flags) -> MemoryScore:
    """Score the rows with a measured and a predicted peak."""
    used = scored & np.isfinite(facts.bytes) & np.isfinite(forecast.memory_bytes)
    error = forecast.memory_bytes[used] / facts.bytes[used] - 1
    return MemoryScore(
        median_abs_error=middle(np.abs(error)),
        p95_abs_error=float(np.percentile(np.abs(error), 95)) if error.size else None,
        max_abs_error=largest(np.abs(error)),
        bias=middle(error),
        inside_interval=_inside(facts.bytes[used], forecast.memory_bytes_low[used], forecast.memory_bytes_high[used]),
        rows=int(used.sum()),
    )


def oom_score(facts: Facts, forecast: Forecast, scored: Flags) -> OomScore:
    """Score the rows with a known fate."""
    positive, negative = scored & facts.fate_is(Fate.OUT_OF_MEMORY), scored & facts.fate_is(Fate.RAN)
    called = forecast.out_of_memory
    found, false_alarms = int((positive & called).sum()), int((negative & called).sum())
    return OomScore(
        recall=_share(found, int(positive.sum())),
        precision=_share(found, found + false_alarms),
        false_alarm_share=_share(false_alarms, int(negative.sum())),
        rows=int((positive | negative).sum()),
        out_of_memory=int(positive.sum()),
        missed=int(positive.sum()) - found,
        false_alarms=false_alarms,
    )


def middle(values: Floats) -> float | None:
    """The median, if there is a value."""
    return float(np.median(values)) if values.size else None


def average(values: Floats) -> float | None:
    """The mean, if there is a value."""
    return float(np.mean(values)) if values.size else None


def largest(values: Floats) -> float | None:
    """The largest, if there is a value."""
    return float(np.max(values)) if values.size else None


def _inside(truth: Floats, low: Floats, high: Floats) -> float | None:
    bounded = np.isfinite(low) & np.isfinite(high)
    held = (low <= truth) & (truth <= high)
    return _share(int(held[bounded].sum()), int(bounded.sum()))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
