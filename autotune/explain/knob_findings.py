"""What each knob contributes to the winner: trials that differ in one knob, its response curve, and its findings."""

import math
from collections.abc import Iterator, Mapping, Sequence

from autotune.explain.evidence import ExplanationEvidence, WinnerOutlook
from autotune.explain.findings import Basis, FarTrial, KnobFinding, KnobPoint, KnobVerdict, knob_text
from autotune.objective.ranking import rate
from autotune.outcome.standings import is_extrapolated
from autotune.prediction.equations.step import Z90
from autotune.request.job_fields import Objective
from autotune.strategies.strategy import UNINFORMATIVE
from search_spaces.environment import ENVIRONMENT
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS, value_text
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.records import TrialRecord


def knob_findings(evidence: ExplanationEvidence) -> tuple[KnobFinding, ...]:
    """All knobs that could have another value: measured before predicted, then by gain, largest first."""
    findings = [_finding(evidence, knob) for knob in explained_knobs(evidence)]
    return tuple(sorted((finding for finding in findings if len(finding.curve) > 1), key=_key))


def _key(finding: KnobFinding) -> tuple[bool, int, float]:
    order = (
        KnobVerdict.FASTER,
        KnobVerdict.MIXED,
        KnobVerdict.UNKNOWN,
        KnobVerdict.FORCED,
        KnobVerdict.NOISE,
        KnobVerdict.ALIKE,
    )
    # Predicted findings come after measured differences.
    informative = finding.source is Basis.MEASURED and finding.verdict in (KnobVerdict.FASTER, KnobVerdict.MIXED)
    return not informative, order.index(finding.verdict), -(finding.gain.mean if finding.gain else 0.0)


def _finding(evidence: ExplanationEvidence, knob: str) -> KnobFinding:
    curve, baseline = curve_of(evidence, knob), baseline_of(evidence)
    value: Value = getattr(evidence.config, knob)
    other_points = [point for point in curve if point.value != value]
    measured = [point for point in other_points if point.compared]
    basis = measured or [point for point in other_points if point.source is Basis.PREDICTED]
    verdict = _verdict_of(other_points, measured, basis)
    nearest = min(basis, key=lambda point: point.speedup.mean if point.speedup else 0.0, default=None)
    distant_trials = () if measured else _far(evidence, knob)
    source = Basis.MEASURED if measured else Basis.PREDICTED if basis else Basis.UNKNOWN
    default, baseline_value = KNOBS[knob].default, getattr(baseline, knob) if baseline else None
    text = knob_text(
        knob,
        verdict,
        source,
        nearest,
        _reference_point(other_points, baseline_value, default, nearest),
        other_points,
        distant_trials,
    )
    least = _least_peak(evidence, other_points)
    peak = evidence.winner.result.peak_memory_bytes if evidence.winner.result else None
    if least is not None and least.peak_bytes and peak:
        # The peak that the winner avoids: `1.35x the peak with 1`.
        marked = " (predicted)" if least.trial is None else ""
        text = f"{least.peak_bytes / peak:.2f}x the peak with {value_text(least.value)}{marked}; {text}"
    return KnobFinding(
        knob=knob,
        value=value,
        default=default,
        baseline=baseline_value,
        verdict=verdict,
        source=source,
        best_other=nearest.value if nearest else None,
        gain=nearest.speedup if nearest else None,
        least_peak=least,
        curve=curve,
        far=distant_trials,
        text=text,
    )


def _verdict_of(other_points: Sequence[KnobPoint], measured: Sequence[KnobPoint], basis: Sequence[KnobPoint]) -> KnobVerdict:
    if not basis:
        unknown = not other_points or any(point.source in (Basis.UNKNOWN, Basis.BOUND) for point in other_points)
        return KnobVerdict.UNKNOWN if unknown else KnobVerdict.FORCED
    # Relative difference of predicted rates below which values count as equal.
    if not measured and all(point.speedup and abs(point.speedup.mean - 1.0) <= 0.01 for point in basis):
        return KnobVerdict.ALIKE
    left_open = any(point.source is Basis.BOUND and not point.compared for point in other_points)
    if all(point.speedup and point.speedup.low > 1.0 for point in basis) and not left_open:
        return KnobVerdict.FASTER
    if not measured:
        return KnobVerdict.UNKNOWN
    predicted = [point for point in other_points if point.source is Basis.PREDICTED]
    speedups = [point.speedup for point in [*measured, *predicted] if point.speedup is not None]
    differs = any(not speedup.low <= 1.0 <= speedup.high for speedup in speedups)
    return KnobVerdict.MIXED if differs else KnobVerdict.NOISE


def _least_peak(evidence: ExplanationEvidence, other_points: Sequence[KnobPoint]) -> KnobPoint | None:
    """Measured before predicted: peaks repeat exactly, and predictions of them do not resolve small differences."""
    if evidence.session.ranking.objective is not Objective.MEMORY:
        return None
    with_peak = [point for point in other_points if point.peak_bytes and point.source is not Basis.DOES_NOT_FIT]
    return min(with_peak, key=lambda point: (point.trial is None, point.peak_bytes), default=None)


def _reference_point(
    other_points: Sequence[KnobPoint], baseline: Value | None, default: Value, nearest: KnobPoint | None
) -> KnobPoint | None:
    """The point at the baseline's value or the default, if it has a rate and is not reported already."""
    for value in (default if baseline is None else baseline, default):
        reference = next((point for point in other_points if point.value == value and point.speedup), None)
        if reference is not None and reference is not nearest:
            return reference
    return None


def _far(evidence: ExplanationEvidence, knob: str) -> tuple[FarTrial, ...]:
    snapshot = evidence.snapshot
    timed = [t for t in snapshot.searched if t.outcome is Outcome.OK and t.result and t.result.samples_per_second]
    trials_with_knobs = list(far_trials(evidence, knob, timed))[:3]
    return tuple(
        FarTrial(
            trial=trial.number,
            value=getattr(trial.config, knob),
            also={name: getattr(trial.config, name) for name in other_knobs},
            speedup=evidence.speedup(trial),
        )
        for trial, other_knobs in trials_with_knobs
    )


LIKELY = 0.5
"""Probability of running below which a configuration is reported as not running."""
_INFORMATIVE = (Outcome.OK, Outcome.PRUNED, Outcome.INFEASIBLE, Outcome.WRONG, Outcome.FAILED, Outcome.TIMEOUT, Outcome.INVALID)
"""Outcomes by how much they say: of several trials with one value, the one whose outcome comes first is reported."""


def curve_of(evidence: ExplanationEvidence, knob: str) -> tuple[KnobPoint, ...]:
    """A point for each value; values that the knob cannot have together with the winner's other knobs are left out."""
    points: dict[Value, KnobPoint] = {}
    unmeasured: dict[Value, TrialConfig] = {}
    for value in values_of(evidence, knob):
        informative = [
            trial
            for trial in _trials(evidence, knob, value)
            if trial.outcome in _INFORMATIVE and trial.outcome not in UNINFORMATIVE
        ]
        # The trial whose outcome says most: the fastest measured one, if there is one.
        trial = min(
            informative, key=lambda trial: (_INFORMATIVE.index(trial.outcome or Outcome.FAILED), -rate(trial)), default=None
        )
        if value == getattr(evidence.config, knob):
            points[value] = _winner_point(evidence, value)
        elif trial is not None:
            points[value] = _measured(evidence, value, trial)
        elif (config := with_value(evidence, knob, value)) is not None:
            refusals = evidence.session.space.check(config)
            if refusals:
                points[value] = _empty(value, Basis.REFUSED, refusals[0].rule)
            else:
                unmeasured[value] = config
    points |= _predicted(evidence.outlook, evidence.rate, unmeasured)
    return tuple(points[value] for value in values_of(evidence, knob) if value in points)


def _trials(evidence: ExplanationEvidence, knob: str, value: Value) -> Sequence[TrialRecord]:
    """Neighbours, and the trial of the exact configuration that the move leads to, even if the move changes other knobs too."""
    config = with_value(evidence, knob, value)
    same = evidence.snapshot.search_trial(config) if config is not None and config != evidence.config else None
    return [*neighbours(evidence, knob, value), *([same] if same is not None else [])]


def _winner_point(evidence: ExplanationEvidence, value: Value) -> KnobPoint:
    peak = evidence.winner.result.peak_memory_bytes if evidence.winner.result else None
    return KnobPoint(
        value=value, source=Basis.MEASURED, samples_per_second=evidence.rate, speedup=None, peak_bytes=peak,
        trial=evidence.winner.number, note="",
    )  # fmt: skip


def _measured(evidence: ExplanationEvidence, value: Value, trial: TrialRecord) -> KnobPoint:
    result = trial.result
    if result is None or result.samples_per_second is None or trial.outcome not in (Outcome.OK, Outcome.PRUNED):
        sources = {Outcome.PRUNED: Basis.BOUND, Outcome.INFEASIBLE: Basis.OUT_OF_MEMORY, Outcome.INVALID: Basis.REFUSED}
        source = sources.get(trial.outcome or Outcome.FAILED, Basis.FAILED)
        note = (result.message if result else "") or (trial.outcome.value.lower() if trial.outcome else "")
        return _empty(value, source, note, trial.number)
    if trial.outcome is Outcome.PRUNED:
        return _bound(evidence, value, trial, result, result.samples_per_second.high)
    fits = result.needed_memory_bytes <= evidence.session.ranking.capacity_bytes
    return KnobPoint(
        value=value,
        source=Basis.MEASURED if fits else Basis.OVER_LIMIT,
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


def _bound(evidence: ExplanationEvidence, value: Value, trial: TrialRecord, result: TrialResult, bound: float) -> KnobPoint:
    """A trial that was ended early: its bound gives the least speedup of the winner over it."""
    winner_rate = evidence.rate
    speedup = Interval(mean=winner_rate.mean / bound, low=winner_rate.low / bound, high=winner_rate.high / bound)
    return KnobPoint(
        value=value, source=Basis.BOUND, samples_per_second=result.samples_per_second, speedup=speedup,
        peak_bytes=result.peak_memory_bytes, trial=trial.number, note="ended early: at most its bound",
    )  # fmt: skip


def _predicted(
    outlook: WinnerOutlook | None, winner_rate: Interval, unmeasured: dict[Value, TrialConfig]
) -> dict[Value, KnobPoint]:
    if outlook is None or not unmeasured:
        return {value: _empty(value, Basis.UNKNOWN, "not measured") for value in unmeasured}
    described = outlook.describe(list(unmeasured.values()))
    ratios, spreads = outlook.log_speedups(described)
    chances = outlook.feasibility.probability(described)
    points = {}
    for index, value in enumerate(unmeasured):
        speedup = band(float(ratios[index]), float(spreads[index]))
        runs = chances[index] >= LIKELY
        points[value] = KnobPoint(
            value=value,
            source=Basis.PREDICTED if runs else Basis.DOES_NOT_FIT,
            samples_per_second=_rate(winner_rate, float(ratios[index]), float(spreads[index])),
            speedup=speedup,
            peak_bytes=float(described.needed[index] - described.outside[index]),
            trial=None,
            note="" if runs else f"{chances[index]:.0%} likely to run".replace("%", " %"),
        )
    return points


def _rate(winner_rate: Interval, log_speedup: float, spread: float) -> Interval:
    """The rate derived from the winner's measured rate, whose error widens the band."""
    error = winner_rate.log_deviation
    # Upper bound of the standard deviation of a measured rate's logarithm; used where the interval reaches down to 0.
    most_error = 0.5
    ratio = band(-log_speedup, math.hypot(spread, most_error if error is None else min(error, most_error)))
    return Interval(mean=winner_rate.mean * ratio.mean, low=winner_rate.mean * ratio.low, high=winner_rate.mean * ratio.high)


def band(log_mean: float, spread: float) -> Interval:
    """A ratio with its 90 % band."""
    low, high = log_mean - Z90 * spread, log_mean + Z90 * spread
    return Interval(mean=math.exp(log_mean), low=math.exp(low), high=math.exp(high))


def _empty(value: Value, source: Basis, note: str, trial: int | None = None) -> KnobPoint:
    return KnobPoint(
        value=value, source=source, samples_per_second=None, speedup=None, peak_bytes=None, trial=trial, note=note
    )  # fmt: skip


def explained_knobs(evidence: ExplanationEvidence) -> list[str]:
    """Knobs that matter in the winner and were searched, or differ from the baseline or the defaults."""
    winner, space, baseline = evidence.config, evidence.session.space, baseline_of(evidence)
    searched = {name for name, values in space.domains.items() if len(values) > 1}
    searched |= {ENVIRONMENT} if evidence.session.request.resolved_environments else set()
    changed = set(winner.differences(TrialConfig())) | (set(winner.differences(baseline)) if baseline else set())
    return [name for name in KNOBS if name in searched | changed and _matters(evidence, name, winner)]


def baseline_of(evidence: ExplanationEvidence) -> TrialConfig | None:
    """The measured baseline; None: none was measured."""
    return evidence.verdict.baseline.config if evidence.verdict.baseline else None


def values_of(evidence: ExplanationEvidence, knob: str) -> list[Value]:
    """The values of the domain, the winner, the default and the baseline, in order."""
    baseline = baseline_of(evidence)
    reference_values = [getattr(config, knob) for config in (evidence.config, baseline, TrialConfig()) if config is not None]
    tried = evidence.session.request.resolved_environments if knob == ENVIRONMENT else ()
    values = list(dict.fromkeys([*evidence.session.space.domains.get(knob, ()), *reference_values, *tried]))
    return values if isinstance(values[0], str) else sorted(values, key=float)


def differing_knobs(evidence: ExplanationEvidence, config: TrialConfig) -> list[str]:
    """Knobs in which a configuration differs from the winner, except those that do not matter in one of the two."""
    winner = evidence.config
    names = [name for name in KNOB_NAMES if getattr(config, name) != getattr(winner, name)]
    return [name for name in names if _matters(evidence, name, winner) and _matters(evidence, name, config)]


def all_differing_knobs(evidence: ExplanationEvidence) -> Mapping[int, list[str]]:
    """Search trial number -> knobs of `differing_knobs`. Computed once for all knobs, since a job may have many trials."""
    if not evidence.differing_knobs:
        evidence.differing_knobs.update(
            {trial.number: differing_knobs(evidence, trial.config) for trial in evidence.snapshot.searched}
        )
    return evidence.differing_knobs


def neighbours(evidence: ExplanationEvidence, knob: str, value: Value) -> list[TrialRecord]:
    """Search trials with the value that differ from the winner only in that knob."""
    differing_by_trial = all_differing_knobs(evidence)
    ended = (trial for trial in evidence.snapshot.searched if differing_by_trial[trial.number] == [knob])
    return [trial for trial in ended if getattr(trial.config, knob) == value]


def with_value(evidence: ExplanationEvidence, knob: str, value: Value) -> TrialConfig | None:
    """The winner with that value; knobs that become relevant take the nearest value of their domain. None: impossible."""
    space = evidence.session.space
    changed = evidence.config.replace({knob: value})
    config = space.admitted(changed) if value in space.domains.get(knob, ()) else space.canonical(changed)
    return config if getattr(config, knob) == value else None


def far_trials(
    evidence: ExplanationEvidence, knob: str, trials: Sequence[TrialRecord]
) -> Iterator[tuple[TrialRecord, list[str]]]:
    """The trials that have another value and differ in a few other knobs, most similar first, with those knobs."""
    differing_by_trial = all_differing_knobs(evidence)
    trials_with_knobs = [(trial, differing_by_trial[trial.number]) for trial in trials]
    trials_with_others = [
        (trial, [name for name in names if name != knob]) for trial, names in trials_with_knobs if knob in names
    ]
    yield from sorted(
        ((t, other_knobs) for t, other_knobs in trials_with_others if 0 < len(other_knobs) <= 2), key=lambda item: len(item[1])
    )


def _matters(evidence: ExplanationEvidence, knob: str, config: TrialConfig) -> bool:
    condition = KNOBS[knob].condition
    return condition is None or condition.holds(config, evidence.session.space.context)
