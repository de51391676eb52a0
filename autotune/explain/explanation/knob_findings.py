"""What each knob contributes to the winner."""

from collections.abc import Sequence

from autotune.explain.explanation.curve import curve_of
from autotune.explain.explanation.evidence import Evidence
from autotune.explain.explanation.findings import FarTrial, KnobFinding, Point, Source, Verdict
from autotune.explain.explanation.neighbours import baseline_of, explained_knobs, far_trials
from autotune.explain.explanation.wording import knob_text, memory_text
from autotune.request.request import Objective
from search_spaces.knob import Value
from search_spaces.knob_values import KNOBS
from search_spaces.outcome import Outcome

ALIKE = 0.01
"""Relative difference of predicted rates below which values count as equal."""
MOST_FAR = 3
_ORDER = (Verdict.FASTER, Verdict.MIXED, Verdict.UNKNOWN, Verdict.FORCED, Verdict.NOISE, Verdict.ALIKE)
"""Order of reporting; predicted findings come after measured differences."""


def knob_findings(evidence: Evidence) -> tuple[KnobFinding, ...]:
    """All knobs that could have another value: measured before predicted, then by gain, largest first."""
    found = [_finding(evidence, knob) for knob in explained_knobs(evidence)]
    return tuple(sorted((one for one in found if len(one.curve) > 1), key=_key))


def _key(finding: KnobFinding) -> tuple[bool, int, float]:
    informative = finding.source is Source.MEASURED and finding.verdict in (Verdict.FASTER, Verdict.MIXED)
    return not informative, _ORDER.index(finding.verdict), -(finding.gain.mean if finding.gain else 0.0)


def _finding(evidence: Evidence, knob: str) -> KnobFinding:
    curve, baseline = curve_of(evidence, knob), baseline_of(evidence)
    value: Value = getattr(evidence.config, knob)
    others = [point for point in curve if point.value != value]
    measured = [point for point in others if point.compared]
    basis = measured or [point for point in others if point.source is Source.PREDICTED]
    verdict = _verdict_of(others, measured, basis)
    nearest = min(basis, key=lambda point: point.speedup.mean if point.speedup else 0.0, default=None)
    far = () if measured else _far(evidence, knob)
    source = Source.MEASURED if measured else Source.PREDICTED if basis else Source.UNKNOWN
    default, baseline_value = KNOBS[knob].default, getattr(baseline, knob) if baseline else None
    text = knob_text(knob, verdict, source, nearest, _reference_point(others, baseline_value, default, nearest), others, far)
    least = _least_peak(evidence, others)
    peak = evidence.winner.result.peak_memory_bytes if evidence.winner.result else None
    if least is not None and least.peak_bytes and peak:
        text = f"{memory_text(least, peak)}; {text}"
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
        far=far,
        text=text,
    )


def _verdict_of(others: Sequence[Point], measured: Sequence[Point], basis: Sequence[Point]) -> Verdict:
    if not basis:
        unknown = not others or any(point.source in (Source.UNKNOWN, Source.BOUND) for point in others)
        return Verdict.UNKNOWN if unknown else Verdict.FORCED
    if not measured and all(point.speedup and abs(point.speedup.mean - 1.0) <= ALIKE for point in basis):
        return Verdict.ALIKE
    left_open = any(point.source is Source.BOUND and not point.compared for point in others)
    if all(point.speedup and point.speedup.low > 1.0 for point in basis) and not left_open:
        return Verdict.FASTER
    if not measured:
        return Verdict.UNKNOWN
    predicted = [point for point in others if point.source is Source.PREDICTED]
    return Verdict.MIXED if any(map(_differs_significantly, [*measured, *predicted])) else Verdict.NOISE


def _least_peak(evidence: Evidence, others: Sequence[Point]) -> Point | None:
    """Measured before predicted: peaks repeat exactly, and predictions of them do not resolve small differences."""
    if evidence.session.ranking.objective is not Objective.MEMORY:
        return None
    with_peak = [point for point in others if point.peak_bytes and point.source is not Source.DOES_NOT_FIT]
    return min(with_peak, key=lambda point: (point.trial is None, point.peak_bytes), default=None)


def _differs_significantly(point: Point) -> bool:
    return point.speedup is not None and not point.speedup.low <= 1.0 <= point.speedup.high


def _reference_point(others: Sequence[Point], baseline: Value | None, default: Value, nearest: Point | None) -> Point | None:
    """The point at the baseline's value or the default, if it has a rate and is not reported already."""
    for value in (default if baseline is None else baseline, default):
        found = next((point for point in others if point.value == value and point.speedup), None)
        if found is not None and found is not nearest:
            return found
    return None


def _far(evidence: Evidence, knob: str) -> tuple[FarTrial, ...]:
    snapshot = evidence.snapshot
    timed = [t for t in snapshot.searched if t.outcome is Outcome.OK and t.result and t.result.samples_per_second]
    found = list(far_trials(evidence, knob, timed))[:MOST_FAR]
    return tuple(
        FarTrial(
            trial=trial.number,
            value=getattr(trial.config, knob),
            also={name: getattr(trial.config, name) for name in others},
            speedup=evidence.speedup(trial),
        )
        for trial, others in found
    )
