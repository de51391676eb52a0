"""The response curve of a knob around the winner: each value measured where possible, else predicted."""

import math
from collections.abc import Sequence

from autotune.explain.explanation.evidence import Evidence, Outlook
from autotune.explain.explanation.findings import Point, Source
from autotune.explain.explanation.neighbours import neighbours, values_of, with_value
from autotune.objective.ranking import rate
from autotune.outcome.standings import is_extrapolated
from autotune.prediction.equations.step import Z90
from autotune.strategies.guided.observations import HALF_WIDTHS, UNINFORMATIVE
from search_spaces.knob import Value
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import TrialRecord

LIKELY = 0.5
"""Probability of running below which a configuration is reported as not running."""
MOST_ERROR = 0.5
"""Upper bound of the standard deviation of a measured rate's logarithm; used where the interval reaches down to 0."""
_SOURCES = {Outcome.PRUNED: Source.BOUND, Outcome.INFEASIBLE: Source.OUT_OF_MEMORY, Outcome.INVALID: Source.REFUSED}
_INFORMATIVE = (Outcome.OK, Outcome.PRUNED, Outcome.INFEASIBLE, Outcome.WRONG, Outcome.FAILED, Outcome.TIMEOUT, Outcome.INVALID)
"""Outcomes by how much they say: of several trials with one value, the one whose outcome comes first is reported."""


def curve_of(evidence: Evidence, knob: str) -> tuple[Point, ...]:
    """A point for each value; values that the knob cannot have together with the winner's other knobs are left out."""
    points: dict[Value, Point] = {}
    unmeasured: dict[Value, TrialConfig] = {}
    for value in values_of(evidence, knob):
        trial = _most_informative(_trials(evidence, knob, value))
        if value == getattr(evidence.config, knob):
            points[value] = _winner_point(evidence, value)
        elif trial is not None:
            points[value] = _measured(evidence, value, trial)
        elif (config := with_value(evidence, knob, value)) is not None:
            refusals = evidence.session.space.check(config)
            if refusals:
                points[value] = _empty(value, Source.REFUSED, refusals[0].rule)
            else:
                unmeasured[value] = config
    points |= _predicted(evidence.outlook, evidence.rate, unmeasured)
    return tuple(points[value] for value in values_of(evidence, knob) if value in points)


def _trials(evidence: Evidence, knob: str, value: Value) -> Sequence[TrialRecord]:
    """Neighbours, and the trial of the exact configuration that the move leads to, even if the move changes other knobs too."""
    config = with_value(evidence, knob, value)
    same = evidence.snapshot.search_trial(config) if config is not None and config != evidence.config else None
    return [*neighbours(evidence, knob, value), *([same] if same is not None else [])]


def _most_informative(trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """Of trials with one value, the most informative one: the fastest measured trial, if there is one."""
    informative = [trial for trial in trials if trial.outcome in _INFORMATIVE and trial.outcome not in UNINFORMATIVE]
    return min(informative, key=lambda trial: (_INFORMATIVE.index(trial.outcome or Outcome.FAILED), -rate(trial)), default=None)


def _winner_point(evidence: Evidence, value: Value) -> Point:
    peak = evidence.winner.result.peak_memory_bytes if evidence.winner.result else None
    return Point(
        value=value, source=Source.MEASURED, samples_per_second=evidence.rate, speedup=None, peak_bytes=peak,
        trial=evidence.winner.number, note="",
    )  # fmt: skip


def _measured(evidence: Evidence, value: Value, trial: TrialRecord) -> Point:
    result = trial.result
    if result is None or result.samples_per_second is None or trial.outcome not in (Outcome.OK, Outcome.PRUNED):
        source = _SOURCES.get(trial.outcome or Outcome.FAILED, Source.FAILED)
        note = (result.message if result else "") or (trial.outcome.value.lower() if trial.outcome else "")
        return _empty(value, source, note, trial.number)
    if trial.outcome is Outcome.PRUNED:
        return _bound(evidence, value, trial, result, result.samples_per_second.high)
    fits = result.needed_memory_bytes <= evidence.session.ranking.capacity_bytes
    return Point(
        value=value,
        source=Source.MEASURED if fits else Source.OVER_LIMIT,
        samples_per_second=evidence.rate_of(trial),
        speedup=evidence.speedup(trial),
        peak_bytes=result.peak_memory_bytes,
        trial=trial.number,
        note="did not settle"
        if result.unstable
        else ""
        if not is_extrapolated(trial) or evidence.snapshot.confirmed(trial.config)
        else "extrapolated",
    )


def _bound(evidence: Evidence, value: Value, trial: TrialRecord, result: TrialResult, bound: float) -> Point:
    """A trial that was ended early: its bound gives the least speedup of the winner over it."""
    own = evidence.rate
    speedup = Interval(mean=own.mean / bound, low=own.low / bound, high=own.high / bound)
    return Point(
        value=value, source=Source.BOUND, samples_per_second=result.samples_per_second, speedup=speedup,
        peak_bytes=result.peak_memory_bytes, trial=trial.number, note="ended early: at most its bound",
    )  # fmt: skip


def _predicted(outlook: Outlook | None, own: Interval, unmeasured: dict[Value, TrialConfig]) -> dict[Value, Point]:
    if outlook is None or not unmeasured:
        return {value: _empty(value, Source.UNKNOWN, "not measured") for value in unmeasured}
    described = outlook.describe(list(unmeasured.values()))
    ratios, spreads = outlook.log_speedups(described)
    chances = outlook.feasibility.probability(described)
    points = {}
    for place, value in enumerate(unmeasured):
        speedup = band(float(ratios[place]), float(spreads[place]))
        runs = chances[place] >= LIKELY
        points[value] = Point(
            value=value,
            source=Source.PREDICTED if runs else Source.DOES_NOT_FIT,
            samples_per_second=_rate(own, float(ratios[place]), float(spreads[place])),
            speedup=speedup,
            peak_bytes=float(described.needed[place] - described.outside[place]),
            trial=None,
            note="" if runs else f"{chances[place]:.0%} likely to run".replace("%", " %"),
        )
    return points


def _rate(own: Interval, log_speedup: float, spread: float) -> Interval:
    """The rate derived from the winner's measured rate, whose error widens the band."""
    error = math.log(own.high / own.low) / (2 * HALF_WIDTHS) if own.low > 0 else MOST_ERROR
    ratio = band(-log_speedup, math.hypot(spread, min(error, MOST_ERROR)))
    return Interval(mean=own.mean * ratio.mean, low=own.mean * ratio.low, high=own.mean * ratio.high)


def band(log_mean: float, spread: float) -> Interval:
    """A ratio with its 90 % band."""
    low, high = log_mean - Z90 * spread, log_mean + Z90 * spread
    return Interval(mean=math.exp(log_mean), low=math.exp(low), high=math.exp(high))


def _empty(value: Value, source: Source, note: str, trial: int | None = None) -> Point:
    return Point(
        value=value, source=source, samples_per_second=None, speedup=None, peak_bytes=None, trial=trial, note=note
    )  # fmt: skip
