"""Texts of findings, one line each."""

from collections.abc import Sequence

from autotune.explain.explanation.findings import Basis, Bound, FarTrial, KnobPoint, KnobVerdict, MoreMemory
from search_spaces.knob_values import value_text
from search_spaces.trial import Interval

WORTH = 1.02
"""Gain below which more memory is not mentioned."""


def knob_text(
    knob: str, verdict: KnobVerdict, source: Basis, nearest: KnobPoint | None, started: KnobPoint | None,
    other_points: Sequence[KnobPoint], far_trials: Sequence[FarTrial],
) -> str:  # fmt: skip
    """What the knob's value is worth, and what is known about its other values."""
    parts = [_headline(verdict, source, nearest, other_points)]
    if started is not None and verdict not in (KnobVerdict.NOISE, KnobVerdict.ALIKE, KnobVerdict.FORCED):
        parts.append(_against(started))
    if over := [point for point in other_points if point.source in (Basis.OUT_OF_MEMORY, Basis.OVER_LIMIT)]:
        parts.append(f"{values_text(over)} {'is' if len(over) == 1 else 'are'} out of memory")
    if not_run := [point for point in other_points if point.source is Basis.DOES_NOT_FIT]:
        parts.append(f"{values_text(not_run)} would not fit (predicted)")
    if left_open := [point for point in other_points if point.source is Basis.BOUND and not point.compared]:
        several = len(left_open) > 1
        ended = f"the trial{'s' * several} of {values_text(left_open)} ended early"
        parts.append(f"{ended}, and leave{'s' * (not several)} it open")
    if far_trials and verdict is not KnobVerdict.ALIKE:
        parts.append(_far(knob, far_trials[0]))
    return "; ".join(parts)


def memory_text(least: KnobPoint, peak: float) -> str:
    """`1.35x the peak with 1`: the peak that the winner avoids."""
    marked = " (predicted)" if least.trial is None else ""
    return f"{(least.peak_bytes or 0.0) / peak:.2f}x the peak with {value_text(least.value)}{marked}"


def _headline(verdict: KnobVerdict, source: Basis, nearest: KnobPoint | None, other_points: Sequence[KnobPoint]) -> str:
    match verdict:
        case KnobVerdict.NOISE:
            return f"no difference within the noise to {values_text(_compared(other_points))}"
        case KnobVerdict.ALIKE:
            return "not measured by itself, and predicted to make no difference"
        case KnobVerdict.FORCED:
            return "no other value runs with all other knobs unchanged"
        case _ if nearest is None:
            return "not measured by itself"
        case _ if verdict is KnobVerdict.UNKNOWN:
            sure = nearest.speedup is not None and nearest.speedup.low > 1.0
            return f"not measured by itself; {_against(nearest)}{'' if sure else ', which the band leaves open'}"
        case _:
            return _against(nearest) + ("" if source is Basis.MEASURED or nearest.source is Basis.PREDICTED else " (predicted)")


def _against(point: KnobPoint) -> str:
    """`2.00x [1.80, 2.22] the rate of 4`, marked as predicted or as a bound."""
    if point.speedup is None:
        return f"no rate is known for {value_text(point.value)}"
    least = "at least " if point.source is Basis.BOUND else ""
    marked = " (predicted)" if point.source in (Basis.PREDICTED, Basis.DOES_NOT_FIT) else ""
    unsure = point.source in (Basis.MEASURED, Basis.BOUND, Basis.OVER_LIMIT) and point.speedup.low <= 1.0 <= point.speedup.high
    return f"{least}{ratio_text(point.speedup)} the rate of {value_text(point.value)}{marked}" + (
        ", not significant" if unsure else ""
    )


def _far(knob: str, trial: FarTrial) -> str:
    values = {knob: trial.value, **trial.also}
    text = ", ".join(f"{name}={value_text(value)}" for name, value in values.items())
    return f"{ratio_text(trial.speedup)} the rate of trial {trial.trial}, which has {text}"


def ratio_text(ratio: Interval) -> str:
    """`2.00x [1.80, 2.22]`."""
    return f"{_figure(ratio.mean)}x [{_figure(ratio.low)}, {_figure(ratio.high)}]"


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 99.995 else f"{value:.3g}"


def percent(share: float) -> str:
    """`12 %`, `1.2 %`."""
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share * 100:.0f} %"


def limits_text(bounds: Sequence[Bound], memory: Sequence[MoreMemory], unexplained: str) -> str:
    """What limits the winner, in one sentence with its figure."""
    first = bounds[0]
    if first.name == unexplained and len(bounds) > 1:
        text = f"{percent(first.share)} of the step is in nothing that the equations know; of what they know, "
        text += f"{bounds[1].name} limits it most ({percent(bounds[1].share)} of the step, predicted)"
    else:
        text = f"{first.name} limits it: {percent(first.share)} of the step would go if it cost nothing (predicted)"
    more = next((option for option in memory if option.gain.mean >= WORTH), None)
    if more is not None:
        text += f", and memory: {percent(more.factor - 1)} more would allow {ratio_text(more.gain)} the rate (predicted)"
    elif memory:
        text += f"; memory does not: {percent(memory[-1].factor - 1)} more would allow nothing faster (predicted)"
    return f"{text[:1].upper()}{text[1:]}."


def _compared(points: Sequence[KnobPoint]) -> list[KnobPoint]:
    return [point for point in points if point.compared]


def values_text(points: Sequence[KnobPoint]) -> str:
    """`1, 2 and 4`."""
    names = [value_text(point.value) for point in points]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
