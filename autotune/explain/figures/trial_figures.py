"""The figures of a job's trials, which the page draws from the trials' columns (`points`), as tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

import numpy as np

from autotune.explain.figures.source import (
    FigureSource,
    FigureUnit,
    MakeFigure,
    bytes_text,
    cell_text,
    column,
    config_text,
    counted,
    limit_marks,
    percent,
    rate_text,
    seconds_text,
    table,
    varying,
)
from autotune.objective.ranking import Ranking, peak_bytes
from autotune.request.job_fields import Objective
from autotune.wire.figures import Axis, Column, Figure, Mark
from search_spaces.knob_values import value_text
from search_spaces.outcome import Outcome
from storage.records import TrialRecord


@dataclass(frozen=True, slots=True)
class _Point:
    """The position of a trial."""

    trial: TrialRecord
    basis: str
    peak: float | None
    rate: float | None
    low: float | None = None
    high: float | None = None


def throughput_memory(source: FigureSource, figure: MakeFigure) -> Figure:
    """Search trials that have ended; each configuration appears once."""
    searched = source.snapshot.searched
    if not searched or source.session is None:
        return figure(summary=source.lacking())
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
    return figure(
        summary=_summary(source, points, best),
        x=Axis(title="peak memory of a rank", unit=FigureUnit.BYTES, column="peak_bytes"),
        y=Axis(title="throughput", unit=FigureUnit.RATE, column="samples_per_second"),
        tables=(trials, edge),
        marks=limit_marks(ranking),
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


def best_so_far(source: FigureSource, figure: MakeFigure) -> Figure:
    """Search trials in the order of their numbers, and in the order in which they ended."""
    searched = source.snapshot.searched
    if not searched or source.session is None:
        return figure(summary=source.lacking())
    ranking = source.session.ranking
    least = ranking.objective is Objective.MEMORY
    unit = FigureUnit.BYTES if least else FigureUnit.RATE
    values = [_value(source, ranking, trial) for trial in searched]
    best = _running(values, least)
    if best[-1] is None:
        return figure(summary=source.lacking("trial that may win"))
    began = min((trial.started for trial in searched if trial.started), default=None)
    trials = table(
        "trials",
        "a search trial, in the order in which they were chosen",
        [
            column("trial", "trial", [trial.number for trial in searched]),
            column("outcome", "outcome", [trial.outcome for trial in searched]),
            column("seconds", "ended after", [_seconds_after(trial, began) for trial in searched], FigureUnit.SECONDS),
            column("value", "its own", values, unit),
            column("best", "best so far", best, unit),
        ],
    )
    ran = [trial for trial in searched if trial.started and trial.finished]
    ended = sorted(ran, key=lambda trial: _seconds_after(trial, began) or 0.0)
    lasting = _running([_value(source, ranking, trial) for trial in ended], least)
    over_time = table(
        "over_time",
        "a search trial that ran, in the order in which they ended",
        [
            column("trial", "trial", [trial.number for trial in ended]),
            column("seconds", "ended after", [_seconds_after(trial, began) for trial in ended], FigureUnit.SECONDS),
            column("best", "best so far", lasting, unit),
        ],
    )
    return figure(
        summary=_best_summary(searched, values, best, unit),
        x=Axis(title="trial", column="trial"),
        y=Axis(title="least peak of a rank" if least else "throughput", unit=unit, column="best"),
        tables=(trials, over_time),
        marks=_baseline_mark(source, ranking, unit),
    )


def _value(source: FigureSource, ranking: Ranking, trial: TrialRecord) -> float | None:
    """The value of the objective; None: the trial may not win."""
    if not ranking.may_win(trial):
        return None
    if ranking.objective is Objective.MEMORY:
        return float(peak_bytes(trial))
    return ranking.rate(trial) if source.evidence is None else source.evidence.verdict.standings.ranked_rate(trial)


def _running(values: Iterable[float | None], least: bool) -> list[float | None]:
    """For each position, the best value up to it."""
    running_best: list[float | None] = []
    best: float | None = None
    for value in values:
        if value is not None and (best is None or (value < best if least else value > best)):
            best = value
        running_best.append(best)
    return running_best


def _seconds_after(trial: TrialRecord, began: datetime | None) -> float | None:
    if trial.finished is None or trial.started is None or began is None:
        return None
    return (trial.finished - began).total_seconds()


def _baseline_mark(source: FigureSource, ranking: Ranking, unit: FigureUnit) -> tuple[Mark, ...]:
    baseline = source.evidence.verdict.baseline if source.evidence is not None else None
    value = _value(source, ranking, baseline) if baseline is not None else None
    if value is None:
        return ()
    return (Mark(axis="y", name="baseline", title=f"baseline {cell_text(value, unit)}", value=value),)


def _best_summary(
    searched: Sequence[TrialRecord], values: Sequence[float | None], best: Sequence[float | None], unit: FigureUnit
) -> str:
    index = next(index for index, value in enumerate(best) if value == best[-1])
    winning = sum(value is not None for value in values)
    since = len(searched) - 1 - index
    reached = f"Trial {searched[index].number} reached {cell_text(best[-1], unit)}{' samples/s' * (unit is FigureUnit.RATE)}"
    after = f"; the {counted(since, 'trial')} after it found nothing better" if since else ", the last one so far"
    return f"{reached}, the best of {counted(len(searched), 'trial')} ({winning:,} may win){after}."


def parallel_coordinates(source: FigureSource, figure: MakeFigure) -> Figure:
    """Search trials that have ended, with a column for each knob in which they differ, in display order."""
    searched = source.snapshot.searched
    knobs = varying(searched)
    if not searched or source.session is None:
        return figure(summary=source.lacking())
    if not knobs:
        summary = f"There is {counted(len(searched), 'trial')}, and so no knob has two values yet."
        return figure(summary=summary)
    rates = [source.rate_of(trial) for trial in searched]
    trials = table(
        "trials",
        "a search trial",
        [
            column("trial", "trial", [trial.number for trial in searched]),
            column("outcome", "outcome", [trial.outcome for trial in searched]),
            *(Column(name=name, title=name, values=tuple(getattr(trial.config, name) for trial in searched)) for name in knobs),
            column("samples_per_second", "samples/s", [rate.mean if rate else None for rate in rates], FigureUnit.RATE),
            column("peak_bytes", "peak a rank", [peak_bytes(trial) or None for trial in searched], FigureUnit.BYTES),
        ],
    )
    vary = "varies" if len(knobs) == 1 else "vary"
    summary = f"{counted(len(searched), 'trial')} over {counted(len(knobs), 'knob')} that {vary}"
    best = source.evidence.config if source.evidence is not None else None
    if best is not None:
        summary += f"; the best has {', '.join(f'{name}={value_text(getattr(best, name))}' for name in knobs[:4])}"
        summary += " and more" if len(knobs) > 4 else ""
    return figure(summary=f"{summary}.", tables=(trials,))


def predicted_measured(source: FigureSource, figure: MakeFigure) -> Figure:
    """Search trials that were measured in full, with the predictions made before any of them ran."""
    if source.unpredicted:
        return figure(summary=f"{source.unpredicted} Nothing was predicted.")
    measured = [trial for trial in source.snapshot.searched if trial.outcome is Outcome.OK and source.rate_of(trial)]
    initial_forecaster = source.initial_forecaster
    if not measured or initial_forecaster is None:
        return figure(summary=source.lacking("trial with a rate"))
    forecasts = initial_forecaster.of([trial.config for trial in measured])
    predicted = [forecast.samples_per_second for forecast in forecasts]
    intervals = [source.rate_of(trial) for trial in measured]
    rates = [interval.mean if interval else math.nan for interval in intervals]
    trials = table(
        "trials",
        "a measured search trial",
        [
            column("trial", "trial", [trial.number for trial in measured]),
            column("predicted", "predicted samples/s", predicted, FigureUnit.RATE),
            column("measured", "measured samples/s", rates, FigureUnit.RATE),
            column("measured_low", "from", [interval.low if interval else None for interval in intervals], FigureUnit.RATE),
            column("measured_high", "to", [interval.high if interval else None for interval in intervals], FigureUnit.RATE),
            column(
                "predicted_peak_bytes",
                "predicted peak",
                [forecast.peak_memory_bytes for forecast in forecasts],
                FigureUnit.BYTES,
            ),
            column("measured_peak_bytes", "measured peak", [peak_bytes(trial) or None for trial in measured], FigureUnit.BYTES),
        ],
    )
    return figure(
        summary=_accuracy_summary(measured, predicted, rates),
        x=Axis(title="predicted", unit=FigureUnit.RATE, column="predicted"),
        y=Axis(title="measured", unit=FigureUnit.RATE, column="measured"),
        tables=(trials,),
        notes=(f"As predicted before the job's first trial, by {initial_forecaster.calibration_source}.",),
    )


def _accuracy_summary(trials: Sequence[TrialRecord], predicted: Sequence[float], measured: Sequence[float]) -> str:
    ratio = median(rate / guess for rate, guess in zip(measured, predicted, strict=True))
    off = median(abs(math.log(rate / guess)) for rate, guess in zip(measured, predicted, strict=True))
    text = f"{counted(len(trials), 'trial')}: measured samples/s are {ratio:.2f} times the predicted ones at the median"
    text += f"; half are off by less than a factor of {math.exp(off):.2f}"
    agreeing = concordance(predicted, measured)
    return f"{text}." if agreeing is None else f"{text}; {percent(agreeing)} of pairs are in the predicted order."


def concordance(values: Sequence[float], other: Sequence[float]) -> float | None:
    """The share of pairs that both put in the same order; None: there is no pair in which both differ."""
    # Of more than 1,000 trials, an evenly spaced subset is compared pair by pair.
    step = max(len(values) // 1000, 1)
    first, second = np.array(values[::step]), np.array(other[::step])
    signs = np.sign(first[:, None] - first) * np.sign(second[:, None] - second)
    distinct = int((signs != 0).sum())
    return float((signs > 0).sum() / distinct) if distinct else None


def timeline(source: FigureSource, figure: MakeFigure) -> Figure:
    """Trials of every purpose that started; a running trial has no end yet."""
    placements = source.store.attempts.placements(source.job.id)
    ran = [trial for trial in source.snapshot.trials if trial.number in placements]
    if not ran:
        return figure(summary=source.lacking("trial that started"))
    starts = {trial.number: trial.started or placements[trial.number].started for trial in ran}
    began = min(starts.values())
    nodes = [placements[trial.number].node or "node not reported" for trial in ran]
    ends = [(trial.finished - began).total_seconds() if trial.finished else None for trial in ran]
    attempts = table(
        "attempts",
        "a trial's last attempt",
        [
            column("node", "node", nodes),
            column("trial", "trial", [trial.number for trial in ran]),
            column("attempt", "attempt", [trial.attempts for trial in ran]),
            column("outcome", "outcome", [trial.outcome for trial in ran]),
            column("purpose", "purpose", [trial.purpose for trial in ran]),
            column("started", "started", [(starts[trial.number] - began).total_seconds() for trial in ran], FigureUnit.SECONDS),
            column("finished", "ended", ends, FigureUnit.SECONDS),
        ],
    )
    busy = sum((trial.finished - starts[trial.number]).total_seconds() for trial in ran if trial.finished)
    whole = max((end for end in ends if end is not None), default=0.0)
    places = len(set(nodes))
    summary = f"{counted(len(ran), 'trial')} on {counted(places, 'node')} in {seconds_text(whole)}"
    if whole:
        at_once = busy / whole
        summary += f", {at_once:.2g} at a time on average" if at_once >= 1.05 else f", which ran {percent(at_once)} of it"
    return figure(
        summary=f"{summary}.",
        x=Axis(title="since the first trial started", unit=FigureUnit.SECONDS, column="started"),
        y=Axis(title="node", column="node"),
        tables=(attempts,),
    )
