"""Reliability diagrams: do stated probabilities hold? Of the verdict on memory, and of the bands of time and memory."""

from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks.prediction.scoring.contract import Flags, Floats, Forecast
from benchmarks.prediction.scoring.facts import Facts
from benchmarks.prediction.scoring.outcomes import Fate

EDGES = (0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 1.0)
"""Edges of the bins of the probability to fit."""
LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Stated shares inside a band. Bands of other levels than 90 % are scaled as those of a normal distribution."""
STATED = 0.9
Document = dict[str, Any]


def reliability(facts: Facts, forecast: Forecast, scored: Flags) -> Document:
    """The diagrams over the scored rows, and each source's share inside the 90 % bands."""
    timed = scored & np.isfinite(facts.seconds) & ~facts.pathological
    bands = {
        "time": (timed, facts.seconds, forecast.step_seconds_low, forecast.step_seconds_high),
        "memory": (scored & np.isfinite(facts.bytes), facts.bytes, forecast.memory_bytes_low, forecast.memory_bytes_high),
    }
    sources = np.array([row.source for row in facts.rows])
    return {
        "fit": _fit_bins(facts, forecast, scored),
        "bands": {name: _levels(_deviations(*band), sources[band[0]]) for name, band in bands.items()},
    }


def _fit_bins(facts: Facts, forecast: Forecast, scored: Flags) -> list[Document]:
    known = scored & (facts.fate_is(Fate.RAN) | facts.fate_is(Fate.OUT_OF_MEMORY)) & np.isfinite(forecast.fit_probability)
    stated, ran = forecast.fit_probability[known], facts.fate_is(Fate.RAN)[known]
    places = np.clip(np.searchsorted(EDGES, stated, side="right") - 1, 0, len(EDGES) - 2)
    found = []
    for place, (low, high) in enumerate(pairwise(EDGES)):
        inside = places == place
        rows = int(inside.sum())
        found.append(
            {
                "low": low, "high": high, "rows": rows, "stated": float(stated[inside].mean()) if rows else None,
                "ran": float(ran[inside].mean()) if rows else None,
            }
        )  # fmt: skip
    return found


def _deviations(used: Flags, measured: Floats, low: Floats, high: Floats) -> Floats:
    """|log(measured / predicted)| over half of the 90 % band's width; the prediction is the middle of the band."""
    middle, half = np.log(low * high) / 2, np.log(high / low) / 2
    found: Floats = np.abs(np.log(measured[used]) - middle[used]) / half[used]
    return found


def _levels(deviations: Floats, sources: Any) -> list[Document]:
    """For each level the share of rows inside, and its mean over the sources."""
    known = np.isfinite(deviations)
    deviations, sources = deviations[known], sources[known]
    found = []
    for level in LEVELS:
        inside = deviations <= _edge(level) / _edge(STATED)
        each = [float(inside[sources == source].mean()) for source in dict.fromkeys(sources)]
        found.append(
            {
                "stated": level, "rows": len(inside), "inside": float(inside.mean()) if len(inside) else None,
                "inside_mean_source": float(np.mean(each)) if each else None,
            }
        )  # fmt: skip
    return found


def _edge(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)
