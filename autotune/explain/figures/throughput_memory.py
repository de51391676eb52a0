"""Samples/s against memory: measured trials, the limit, the front, and predicted positions of trials without a rate."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.explain.figures.figure import FigureUnit, bytes_text, column, config_text, counted, rate_text, table, varying
from autotune.explain.figures.source import FigureSource
from autotune.objective.ranking import peak_bytes
from autotune.wire.figures import Axis, Figure, Mark
from search_spaces.outcome import Outcome
from storage.records import TrialRecord

NAME, TITLE = "throughput_memory", "Throughput against memory"


@dataclass(frozen=True, slots=True)
class _Point:
    """The position of a trial."""

    trial: TrialRecord
    basis: str
    peak: float | None
    rate: float | None
    low: float | None = None
    high: float | None = None


def throughput_memory(source: FigureSource) -> Figure:
    """Search trials that have ended; each configuration appears once."""
    searched = source.snapshot.searched
    if not searched or source.session is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking())
    ranking, knobs = source.session.ranking, varying(searched)
    predicted = _predicted(source, searched)
    points = [_point(source, trial, predicted.get(trial.number)) for trial in searched]
    best, baseline = _named(source)
    shown = {trial.number: source.rate_of(trial) for trial in searched}
    front = source.evidence.verdict.standings.front() if source.evidence is not None else []
    on_front = {trial.number for trial in front}
    numbers = [point.trial.number for point in points]
    trials = table(
        "trials",
        "a search trial",
        [
            column("trial", "trial", numbers),
            column("outcome", "outcome", [point.trial.outcome for point in points]),
            column("placed", "placed by", [point.basis for point in points]),
            column("peak_bytes", "peak a rank", [point.peak for point in points], FigureUnit.BYTES),
            column("samples_per_second", "samples/s", [point.rate for point in points], FigureUnit.RATE),
            column("low", "from", [point.low for point in points], FigureUnit.RATE),
            column("high", "to", [point.high for point in points], FigureUnit.RATE),
            column("best", "best", [number == best for number in numbers]),
            column("baseline", "baseline", [number == baseline for number in numbers]),
            column("front", "on the front", [number in on_front for number in numbers]),
            column("config", "configuration", [config_text(point.trial.config, knobs) for point in points]),
        ],
    )
    rates = [shown[trial.number] for trial in front]
    edge = table(
        "front",
        "a trial that no other trial beats in both",
        [
            column("trial", "trial", [trial.number for trial in front]),
            column("peak_bytes", "peak a rank", [peak_bytes(trial) or None for trial in front], FigureUnit.BYTES),
            column("samples_per_second", "samples/s", [rate.mean if rate else None for rate in rates], FigureUnit.RATE),
            column("config", "configuration", [config_text(trial.config, knobs) for trial in front]),
        ],
    )
    return Figure(
        name=NAME,
        title=TITLE,
        summary=_summary(source, points, best),
        x=Axis(title="peak memory of a rank", unit=FigureUnit.BYTES, column="peak_bytes"),
        y=Axis(title="throughput", unit=FigureUnit.RATE, column="samples_per_second"),
        tables=(trials, edge),
        marks=_marks(ranking.memory_limit_bytes, ranking.capacity_bytes),
        notes=_notes(source, points),
    )


def _predicted(source: FigureSource, searched: Sequence[TrialRecord]) -> Mapping[int, tuple[float, float]]:
    """Samples/s and peak bytes of the trials without a position. The peak is the allocator's, as measured for other trials."""
    outcomes = (Outcome.INFEASIBLE, Outcome.FAILED, Outcome.WRONG, Outcome.TIMEOUT, Outcome.LOST, Outcome.PRUNED)
    unplaced_trials = [trial for trial in searched if trial.outcome in outcomes and not (_rate(trial) and peak_bytes(trial))]
    if not unplaced_trials or source.forecast is None:
        return {}
    described = source.forecast.describe([trial.config for trial in unplaced_trials])
    rates = np.exp(source.forecast.surrogate.mean(described))
    peaks = described.needed - described.outside
    return {trial.number: (float(rates[index]), float(peaks[index])) for index, trial in enumerate(unplaced_trials)}


def _point(source: FigureSource, trial: TrialRecord, predicted: tuple[float, float] | None) -> _Point:
    interval, peak = source.rate_of(trial), float(peak_bytes(trial)) or None
    if trial.outcome is Outcome.PRUNED and interval is not None:
        return _Point(trial, "bound", peak or (predicted[1] if predicted else None), interval.high, None, interval.high)
    if interval is not None and math.isfinite(interval.mean):
        return _Point(trial, "measured", peak, interval.mean, interval.low, interval.high)
    if predicted is not None:
        return _Point(trial, "predicted", peak or predicted[1], predicted[0])
    return _Point(trial, "none", peak, None)


def _rate(trial: TrialRecord) -> bool:
    return trial.result is not None and trial.result.samples_per_second is not None


def _named(source: FigureSource) -> tuple[int | None, int | None]:
    """Numbers of the best trial and of the baseline."""
    if source.evidence is None:
        return None, None
    verdict = source.evidence.verdict
    return verdict.best.number, verdict.baseline.number if verdict.baseline is not None else None


def _marks(limit: int | None, capacity: float) -> tuple[Mark, ...]:
    if limit is None:
        return ()
    marks = [Mark(axis="x", name="limit", title=f"limit {bytes_text(limit)}", value=float(limit))]
    if capacity < limit:
        capacity_mark = Mark(axis="x", name="capacity", title=f"less headroom {bytes_text(capacity)}", value=capacity)
        marks.append(capacity_mark)
    return tuple(marks)


def _summary(source: FigureSource, points: Sequence[_Point], best: int | None) -> str:
    measured_count = sum(point.basis == "measured" for point in points)
    predicted_count = sum(point.basis == "predicted" for point in points)
    text = f"{counted(measured_count, 'trial')} measured"
    if predicted_count:
        text += f", {predicted_count:,} without a rate placed by prediction"
    won = next((point for point in points if point.trial.number == best), None)
    if won is None or won.rate is None:
        return f"{text}; {source.lacking('winner yet')[:1].lower()}{source.lacking('winner yet')[1:]}"
    peak = f" at {bytes_text(won.peak)} a rank" if won.peak else ""
    return f"{text}; the best is trial {best} with {rate_text(won.rate)} samples/s{peak}."


def _notes(source: FigureSource, points: Sequence[_Point]) -> tuple[str, ...]:
    notes = []
    if any(point.basis == "predicted" for point in points):
        notes.append("Rows placed by `predicted` have no rate: the equations predict it, corrected by the job's trials.")
    if any(point.basis == "bound" for point in points):
        notes.append("Trials that were ended early are at the highest rate that they could have reached.")
    if unplaced := sum(point.rate is None or point.peak is None for point in points):
        notes.append(f"{counted(unplaced, 'trial')} without rate or peak: only in the table. {source.unpredicted}".strip())
    return tuple(notes)
