"""Predicted against measured: how accurate the equations were before the job's first trial."""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from autotune.explain.figures.figure import FigureUnit, column, counted, percent, table
from autotune.explain.figures.source import FigureSource
from autotune.objective.ranking import peak_bytes
from autotune.wire.figures import Axis, Figure
from search_spaces.outcome import Outcome
from storage.records import TrialRecord

NAME, TITLE = "predicted_measured", "Predicted against measured"
MOST_PAIRS = 1000
"""Most trials that are compared pair by pair; of more, an evenly spaced subset."""


def predicted_measured(source: FigureSource) -> Figure:
    """Search trials that were measured in full, with the predictions made before any of them ran."""
    if source.unpredicted:
        return Figure(name=NAME, title=TITLE, summary=f"{source.unpredicted} Nothing was predicted.")
    measured = [trial for trial in source.snapshot.searched if trial.outcome is Outcome.OK and source.rate_of(trial)]
    initial_forecaster = source.initial_forecaster
    if not measured or initial_forecaster is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking("trial with a rate"))
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
    return Figure(
        name=NAME,
        title=TITLE,
        summary=_summary(measured, predicted, rates),
        x=Axis(title="predicted", unit=FigureUnit.RATE, column="predicted"),
        y=Axis(title="measured", unit=FigureUnit.RATE, column="measured"),
        tables=(trials,),
        notes=(f"As predicted before the job's first trial, by {initial_forecaster.rests_on}.",),
    )


def _summary(trials: Sequence[TrialRecord], predicted: Sequence[float], measured: Sequence[float]) -> str:
    ratio = median(rate / guess for rate, guess in zip(measured, predicted, strict=True))
    off = median(abs(math.log(rate / guess)) for rate, guess in zip(measured, predicted, strict=True))
    text = f"{counted(len(trials), 'trial')}: measured samples/s are {ratio:.2f} times the predicted ones at the median"
    text += f"; half are off by less than a factor of {math.exp(off):.2f}"
    agreeing = concordance(predicted, measured)
    return f"{text}." if agreeing is None else f"{text}; {percent(agreeing)} of pairs are in the predicted order."


def concordance(values: Sequence[float], other: Sequence[float]) -> float | None:
    """The share of pairs that both put in the same order; None: there is no pair in which both differ."""
    step = max(len(values) // MOST_PAIRS, 1)
    first, second = np.array(values[::step]), np.array(other[::step])
    signs = np.sign(first[:, None] - first) * np.sign(second[:, None] - second)
    distinct = int((signs != 0).sum())
    return float((signs > 0).sum() / distinct) if distinct else None
