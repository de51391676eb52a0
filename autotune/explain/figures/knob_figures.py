"""The figures of knobs: the effect of each around the winner, and its share of the variance over the space."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.explain.evidence import Forecast
from autotune.explain.figures.source import FigureSource, FigureUnit, MakeFigure, column, counted, percent, table
from autotune.explain.findings import KnobFinding
from autotune.explain.knob_findings import knob_findings
from autotune.wire.figures import Axis, Figure
from search_spaces.canonical import SEARCH_ORDER
from search_spaces.knob_values import value_text
from search_spaces.lattice import DEPTHS, Lattice, Prefix
from search_spaces.space import SearchSpace
from search_spaces.trial_config import KNOB_NAMES, TrialConfig


def response_curves(source: FigureSource, figure: MakeFigure) -> Figure:
    """The curves of `autotune explain`, the most informative knob first."""
    if source.evidence is None:
        return figure(summary=source.lacking())
    findings = [
        finding
        for finding in knob_findings(source.evidence)
        if any(point.samples_per_second is not None for point in finding.curve)
    ]
    rows = [(finding, position, point) for finding in findings for position, point in enumerate(finding.curve)]
    if not rows:
        return figure(summary="No knob could have another value.")
    rates = [point.samples_per_second for _, _, point in rows]
    points = table(
        "points",
        "a value of a knob, all other knobs as in the best",
        [
            column("knob", "knob", [finding.knob for finding, _, _ in rows]),
            column("value", "value", [value_text(point.value) for _, _, point in rows]),
            column("place", "place", [position for _, position, _ in rows]),
            column("source", "rests on", [point.source for _, _, point in rows]),
            column("samples_per_second", "samples/s", [rate.mean if rate else None for rate in rates], FigureUnit.RATE),
            column("low", "from", [rate.low if rate else None for rate in rates], FigureUnit.RATE),
            column("high", "to", [rate.high if rate else None for rate in rates], FigureUnit.RATE),
            column(
                "speedup",
                "the best over it",
                [point.speedup.mean if point.speedup else None for _, _, point in rows],
                FigureUnit.RATIO,
            ),
            column("peak_bytes", "peak a rank", [point.peak_bytes for _, _, point in rows], FigureUnit.BYTES),
            column("trial", "trial", [point.trial for _, _, point in rows]),
            column("note", "note", [point.note for _, _, point in rows]),
        ],
    )
    knobs = table(
        "knobs",
        "a knob",
        [
            column("knob", "knob", [finding.knob for finding in findings]),
            column("best", "of the best", [value_text(finding.value) for finding in findings]),
            column("verdict", "verdict", [finding.verdict for finding in findings]),
            column("text", "in words", [finding.text for finding in findings]),
        ],
    )
    return figure(
        summary=_summary(findings),
        x=Axis(title="value of the knob", column="value"),
        y=Axis(title="throughput", unit=FigureUnit.RATE, column="samples_per_second"),
        tables=(points, knobs),
        notes=("Values that were not measured with all other knobs equal are predicted, corrected by the job's trials.",),
    )


def _summary(findings: list[KnobFinding]) -> str:
    first = findings[0]
    return f"{counted(len(findings), 'knob')} around the best; {first.knob}={value_text(first.value)}: {first.text}."


DRAWS = 100
"""Draws from the surrogate, from which the intervals are computed."""
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Share:
    knob: str
    middle: float
    low: float
    high: float
    values: int


def knob_importance(source: FigureSource, figure: MakeFigure) -> Figure:
    """Computed with the surrogate of guided search, for jobs of any strategy.

    1. Draw configurations from the space, knob by knob, each legal value with the same probability.
    2. Draw their rates jointly from the surrogate after the job's trials (equations, corrected by a Gaussian process).
    3. In each draw, a knob's share is the variance between the means of its values over the total variance, less the amount
       expected by chance (epsilon squared [Kelley 1935]): a main effect of a functional ANOVA [Hutter 2014].
    4. Report medians, with the interval that contains 90 % of the draws.
    """
    searched = source.snapshot.searched
    if not searched or source.session is None:
        return figure(summary=source.lacking())
    timed = sum(source.rate_of(trial) is not None for trial in searched)
    # Least number of trials with a rate; with fewer, the importance would come from the equations only.
    fewest = 5
    if timed < fewest:
        summary = f"{counted(timed, 'trial')} {'has' if timed == 1 else 'have'} a rate: knob importance needs {fewest}."
        return figure(summary=summary)
    forecast = source.forecast or source.stand_in_forecast
    drawn = drawn_from(source.session.space, random.Random(source.session.request.seed))
    if forecast is not None:
        likely = forecast.feasibility.quick_probability(forecast.describe(drawn)) >= 0.5
        if likely.sum() >= fewest:  # the others have no rate
            drawn = [config for config, fits in zip(drawn, likely, strict=True) if fits]
    knob_shares, together = shares(forecast, drawn) if forecast is not None else ([], 0.0)
    if not knob_shares:
        return figure(summary="No knob has two values that run: there is nothing to compare.")
    best = source.evidence.config if source.evidence is not None else None
    knobs = table(
        "knobs",
        "a knob, the most important first",
        [
            column("knob", "knob", [share.knob for share in knob_shares]),
            column("importance", "share of the variance", [share.middle for share in knob_shares], FigureUnit.SHARE),
            column("low", "from", [share.low for share in knob_shares], FigureUnit.SHARE),
            column("high", "to", [share.high for share in knob_shares], FigureUnit.SHARE),
            column("values", "values", [share.values for share in knob_shares]),
            column("best", "of the best", [value_text(getattr(best, share.knob)) if best else None for share in knob_shares]),
        ],
    )
    first = knob_shares[0]
    band = f"{percent(first.low)} to {percent(first.high)}"
    summary = f"{first.knob} matters most: it accounts for {percent(first.middle)} of the variance of samples/s"
    return figure(
        summary=f"{summary} ({band}, nine times in ten).",
        x=Axis(title="share of the variance of log samples/s", unit=FigureUnit.SHARE, column="importance"),
        y=Axis(title="knob", column="knob"),
        tables=(knobs,),
        notes=_notes(source, len(drawn), timed, together),
    )


def _notes(source: FigureSource, drawn: int, timed: int, together: float) -> tuple[str, ...]:
    over = f"Main effects over {counted(drawn, 'configuration')} of the space that should fit"
    by = f"by predictions that {counted(timed, 'trial')} with a rate corrected; intervals reflect their uncertainty."
    notes = [f"{over}, {by}", f"{percent(together)} of the variance comes from several knobs together."]
    if source.unpredicted:
        notes.append(f"{source.unpredicted} A transformer of its size stands in for it.")
    return tuple(notes)


def shares(forecast: Forecast, drawn: Sequence[TrialConfig]) -> tuple[list[_Share], float]:
    """The share of each knob with several values, largest first, and of several knobs together. Empty: all are equally fast."""
    mean, covariance = forecast.surrogate.joint(forecast.describe(drawn))
    root = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(drawn)) * max(float(np.trace(covariance)) / len(drawn), 1e-6))
    random_parts = np.random.default_rng(0).standard_normal((len(drawn), DRAWS))
    draws = mean[:, None] + root @ random_parts
    total = draws.var(axis=0)
    # Variance of the logarithm below which all configurations count as equally fast.
    negligible = 1e-12
    if total.max() < negligible:
        return [], 0.0
    knob_shares, sums = [], np.zeros(DRAWS)
    for name in KNOB_NAMES:
        values = list(dict.fromkeys(getattr(config, name) for config in drawn))
        if len(values) < 2:
            continue
        places = np.array([values.index(getattr(config, name)) for config in drawn])
        explained = _explained(draws, places, len(values)) / np.maximum(total, negligible)
        sums += explained
        low, middle, high = (float(edge) for edge in np.quantile(explained, (0.05, 0.5, 0.95)))
        knob_shares.append(_Share(name, middle, low, high, len(values)))
    return sorted(knob_shares, key=lambda share: -share.middle), float(np.median(np.maximum(1.0 - sums, 0.0)))


def _explained(draws: Array, places: NDArray[np.int64], groups: int) -> Array:
    """For each draw (column), the variance between the means of groups, less the amount expected by chance; at least 0."""
    count = len(places)
    members = np.zeros((groups, count))
    members[places, np.arange(count)] = 1.0
    sizes = members.sum(axis=1)
    centred = draws - draws.mean(axis=0)
    means = (members @ centred) / sizes[:, None]
    between = (sizes[:, None] * means**2).sum(axis=0)
    within = (centred**2).sum(axis=0) - between
    chance = (groups - 1) * within / max(count - groups, 1)
    explained: Array = np.maximum(between - chance, 0.0) / count
    return explained


def drawn_from(space: SearchSpace, rng: random.Random) -> list[TrialConfig]:
    """Distinct legal configurations, drawn knob by knob, which needs no count of the space (slow for a large one)."""
    configs: dict[TrialConfig, None] = {}
    for _ in range(400):
        configs.setdefault(space.base.replace(dict(zip(SEARCH_ORDER, _drawn(space.lattice, rng), strict=True))))
    return list(configs)


def _drawn(lattice: Lattice, rng: random.Random) -> Prefix:
    prefix: Prefix = ()
    while len(prefix) < DEPTHS:
        choices = list(lattice.legal_choices(prefix))
        rng.shuffle(choices)
        prefix = next(longer for value in choices if lattice.has_legal(longer := (*prefix, value)))
    return prefix
