"""Findings in words: one line each."""

from collections.abc import Sequence

from autotune.explain.explanation.findings import Bound, FarTrial, MoreMemory, Point, Source, Verdict
from search_spaces.knobs import value_text
from search_spaces.trial import Interval

WORTH = 1.02
"""Gain below which more memory is not worth a word."""


def knob_text(
    knob: str, verdict: Verdict, source: Source, nearest: Point | None, started: Point | None, others: Sequence[Point],
    far: Sequence[FarTrial],
) -> str:  # fmt: skip
    """What the knob's value is worth, with what else is known of the others."""
    told = [_headline(verdict, source, nearest, others)]
    if started is not None and verdict not in (Verdict.NOISE, Verdict.ALIKE, Verdict.FORCED):
        told.append(_against(started))
    if over := [point for point in others if point.source in (Source.OUT_OF_MEMORY, Source.OVER_LIMIT)]:
        told.append(f"{values_text(over)} {'is' if len(over) == 1 else 'are'} out of memory")
    if not_run := [point for point in others if point.source is Source.DOES_NOT_FIT]:
        told.append(f"{values_text(not_run)} would not fit (predicted)")
    if left_open := [point for point in others if point.source is Source.BOUND and not point.compared]:
        several = len(left_open) > 1
        ended = f"the trial{'s' * several} of {values_text(left_open)} ended early"
        told.append(f"{ended}, and leave{'s' * (not several)} it open")
    if far and verdict is not Verdict.ALIKE:
        told.append(_far(knob, far[0]))
    return "; ".join(told)


def memory_text(least: Point, peak: float) -> str:
    """`1.35x the peak with 1`: what the winner is spared."""
    marked = " (predicted)" if least.trial is None else ""
    return f"{(least.peak_bytes or 0.0) / peak:.2f}x the peak with {value_text(least.value)}{marked}"


def _headline(verdict: Verdict, source: Source, nearest: Point | None, others: Sequence[Point]) -> str:
    match verdict:
        case Verdict.NOISE:
            return f"no difference within the noise to {values_text(_compared(others))}"
        case Verdict.ALIKE:
            return "not measured alone, and no equation tells its values apart"
        case Verdict.FORCED:
            return "no other value runs with all else as it is"
        case _ if nearest is None:
            return "not measured alone"
        case _ if verdict is Verdict.UNKNOWN:
            sure = nearest.speedup is not None and nearest.speedup.low > 1.0
            return f"not measured alone; {_against(nearest)}{'' if sure else ', which the band leaves open'}"
        case _:
            return _against(nearest) + (
                "" if source is Source.MEASURED or nearest.source is Source.PREDICTED else " (predicted)"
            )


def _against(point: Point) -> str:
    """`2.00x [1.80, 2.22] the rate of 4`, and what that rests on."""
    if point.speedup is None:
        return f"nothing of {value_text(point.value)}"
    least = "at least " if point.source is Source.BOUND else ""
    marked = " (predicted)" if point.source in (Source.PREDICTED, Source.DOES_NOT_FIT) else ""
    unsure = (
        point.source in (Source.MEASURED, Source.BOUND, Source.OVER_LIMIT) and point.speedup.low <= 1.0 <= point.speedup.high
    )
    return f"{least}{ratio_text(point.speedup)} the rate of {value_text(point.value)}{marked}" + (
        ", not told apart" if unsure else ""
    )


def _far(knob: str, trial: FarTrial) -> str:
    values = {knob: trial.value, **trial.also}
    told = ", ".join(f"{name}={value_text(value)}" for name, value in values.items())
    return f"{ratio_text(trial.speedup)} the rate of trial {trial.trial}, which has {told}"


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
        told = f"{percent(first.share)} of the step is in nothing that the equations know; of what they know, "
        told += f"{bounds[1].name} limits it most ({percent(bounds[1].share)} of the step, predicted)"
    else:
        told = f"{first.name} limits it: {percent(first.share)} of the step would go if it cost nothing (predicted)"
    more = next((one for one in memory if one.gain.mean >= WORTH), None)
    if more is not None:
        told += f", and memory: {percent(more.factor - 1)} more would allow {ratio_text(more.gain)} the rate (predicted)"
    elif memory:
        told += f"; memory does not: {percent(memory[-1].factor - 1)} more would allow nothing faster (predicted)"
    return f"{told[:1].upper()}{told[1:]}."


def _compared(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.compared]


def values_text(points: Sequence[Point]) -> str:
    """`1, 2 and 4`."""
    names = [value_text(point.value) for point in points]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
