"""Which knobs matter: the share of the variance of samples/s over the space that each accounts for alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.explain.explanation.forecast import Forecast
from autotune.explain.figures.figure import Axis, Figure, Unit, column, table
from autotune.explain.figures.source import Source
from autotune.explain.figures.texts import counted
from autotune.explain.figures.units import percent
from search_spaces.canonical import SEARCH_ORDER
from search_spaces.knobs import value_text
from search_spaces.lattice import DEPTHS, Lattice, Prefix
from search_spaces.space import SearchSpace
from search_spaces.trial_config import KNOB_NAMES, TrialConfig

NAME, TITLE = "knob_importance", "Which knobs matter"
FEWEST = 5
"""Trials with a rate from which importance is told; of fewer it would be the equations' alone."""
DRAWN = 400
"""Configurations over which the variance is taken."""
BELIEFS = 100
"""Draws of the belief, from which the intervals are."""
EDGES = (0.05, 0.5, 0.95)
NOTHING = 1e-12
"""Variance of the logarithm below which all configurations are as fast."""
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Share:
    knob: str
    middle: float
    low: float
    high: float
    values: int


def knob_importance(source: Source) -> Figure:
    """By the belief of guided search, whatever strategy the job has.

    1. Configurations are drawn from the space, knob by knob, each legal value as likely as the others.
    2. The belief after the job's trials (equations, corrected by a Gaussian process) is drawn for all of them together.
    3. In each draw a knob's share is the variance between the means of its values over the variance of all, less what chance
       makes of it (epsilon squared [Kelley 1935]): a main effect of a functional ANOVA [Hutter 2014].
    4. Medians are told, with the interval that holds nine draws in ten.
    """
    searched = source.book.searched
    if not searched or source.session is None:
        return Figure(name=NAME, title=TITLE, summary=source.lacking())
    timed = sum(source.rate_of(trial) is not None for trial in searched)
    if timed < FEWEST:
        summary = (
            f"{counted(timed, 'trial')} {'has' if timed == 1 else 'have'} a rate: which knobs matter is told from {FEWEST} on."
        )
        return Figure(name=NAME, title=TITLE, summary=summary)
    forecast = source.forecast or source.likeness
    drawn = drawn_from(source.session.space, random.Random(source.session.request.seed))
    if forecast is not None:
        drawn = _that_fit(forecast, drawn)
    found, together = shares(forecast, drawn) if forecast is not None else ([], 0.0)
    if not found:
        return Figure(name=NAME, title=TITLE, summary="No knob has two values that run: there is nothing to weigh.")
    best = source.evidence.config if source.evidence is not None else None
    knobs = table(
        "knobs",
        "a knob, the most important first",
        [
            column("knob", "knob", [share.knob for share in found]),
            column("importance", "share of the variance", [share.middle for share in found], Unit.SHARE),
            column("low", "from", [share.low for share in found], Unit.SHARE),
            column("high", "to", [share.high for share in found], Unit.SHARE),
            column("values", "values", [share.values for share in found]),
            column("best", "of the best", [value_text(getattr(best, share.knob)) if best else None for share in found]),
        ],
    )
    first = found[0]
    band = f"{percent(first.low)} to {percent(first.high)}"
    summary = f"{first.knob} matters most: it accounts for {percent(first.middle)} of the variance of samples/s"
    return Figure(
        name=NAME,
        title=TITLE,
        summary=f"{summary} ({band}, nine times in ten).",
        x=Axis(title="share of the variance of log samples/s", unit=Unit.SHARE, column="importance"),
        y=Axis(title="knob", column="knob"),
        tables=(knobs,),
        notes=_notes(source, len(drawn), timed, together),
    )


def _notes(source: Source, drawn: int, timed: int, together: float) -> tuple[str, ...]:
    over = f"Main effects over {counted(drawn, 'configuration')} of the space that should fit"
    by = f"by predictions that {counted(timed, 'trial')} with a rate corrected; intervals are of the belief in them."
    notes = [f"{over}, {by}", f"{percent(together)} of the variance is of several knobs together."]
    if source.shapeless:
        notes.append(f"{source.shapeless} It is taken for a transformer of its size.")
    return tuple(notes)


def _that_fit(forecast: Forecast, drawn: list[TrialConfig]) -> list[TrialConfig]:
    """Those that are likely to: what never runs has no rate that could vary. All, where few would be left."""
    likely = forecast.feasibility.quick_probability(forecast.describe(drawn)) >= 0.5
    return [config for config, fits in zip(drawn, likely, strict=True) if fits] if likely.sum() >= FEWEST else drawn


def shares(forecast: Forecast, drawn: Sequence[TrialConfig]) -> tuple[list[_Share], float]:
    """The share of each knob that has several values, largest first; and of several knobs together. Empty: all are as fast."""
    mean, covariance = forecast.belief.joint(forecast.describe(drawn))
    root = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(drawn)) * max(float(np.trace(covariance)) / len(drawn), 1e-6))
    random_parts = np.random.default_rng(0).standard_normal((len(drawn), BELIEFS))
    beliefs = mean[:, None] + root @ random_parts
    total = beliefs.var(axis=0)
    if total.max() < NOTHING:
        return [], 0.0
    found, sums = [], np.zeros(BELIEFS)
    for name in KNOB_NAMES:
        values = list(dict.fromkeys(getattr(config, name) for config in drawn))
        if len(values) < 2:
            continue
        places = np.array([values.index(getattr(config, name)) for config in drawn])
        explained = _explained(beliefs, places, len(values)) / np.maximum(total, NOTHING)
        sums += explained
        low, middle, high = (float(edge) for edge in np.quantile(explained, EDGES))
        found.append(_Share(name, middle, low, high, len(values)))
    return sorted(found, key=lambda share: -share.middle), float(np.median(np.maximum(1.0 - sums, 0.0)))


def _explained(beliefs: Array, places: NDArray[np.int64], groups: int) -> Array:
    """Of each belief (columns), the variance between the means of groups, less what chance makes of it; never below 0."""
    count = len(places)
    members = np.zeros((groups, count))
    members[places, np.arange(count)] = 1.0
    sizes = members.sum(axis=1)
    centred = beliefs - beliefs.mean(axis=0)
    means = (members @ centred) / sizes[:, None]
    between = (sizes[:, None] * means**2).sum(axis=0)
    within = (centred**2).sum(axis=0) - between
    chance = (groups - 1) * within / max(count - groups, 1)
    told: Array = np.maximum(between - chance, 0.0) / count
    return told


def drawn_from(space: SearchSpace, rng: random.Random) -> list[TrialConfig]:
    """Different legal configurations, knob by knob: no count of the space is needed, which a large one takes long for."""
    found: dict[TrialConfig, None] = {}
    for _ in range(DRAWN):
        found.setdefault(space.base.replace(dict(zip(SEARCH_ORDER, _drawn(space.lattice, rng), strict=True))))
    return list(found)


def _drawn(lattice: Lattice, rng: random.Random) -> Prefix:
    prefix: Prefix = ()
    while len(prefix) < DEPTHS:
        choices = list(lattice.legal_choices(prefix))
        rng.shuffle(choices)
        prefix = next(longer for value in choices if lattice.leads(longer := (*prefix, value)))
    return prefix
