"""Coefficients from trials that were run: what a micro-benchmark cannot tell, and how far a prediction can be trusted."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from autotune.prediction.cases import Array
from autotune.prediction.coefficients import Coefficients, names
from autotune.prediction.fitting import fitted
from autotune.prediction.memory import memory
from autotune.prediction.step import predict
from autotune.prediction.trial_history import Runs, trial_history
from search_spaces.cluster import ClusterSpec
from storage.store import Store

TIME_NOISE = 0.08
"""Standard deviation of the logarithm of a step's seconds over what the equations can say of it."""
MEMORY_NOISE = 0.04
ALLOCATED = ("workspace_bytes", "activation_scale", "working_layers")
"""The coefficients of memory that the allocator's peak tells of; the others are outside of it."""
FOLDS = 5
WORTH = 6.0
"""Trials that the spread of before is worth."""
LEAST_SPREAD = 0.02


def coefficients_from_trials(store: Store, cluster: ClusterSpec, engine: str, before: Coefficients) -> tuple[Coefficients, int]:
    """The most probable coefficients after the trials of the database on the same hardware, and how many those were.

    What is known `before` (shipped, or from a micro-benchmark) is the prior, so that few trials move little.
    """
    return fit_runs(trial_history(store, cluster, engine), before)


def fit_runs(history: Sequence[Runs], before: Coefficients) -> tuple[Coefficients, int]:
    """See `coefficients_from_trials`.

    1. Fit the coefficients of time on step times and those of memory on the allocator's peaks.
    2. Spreads are of residuals on configurations that a fit has not seen, in folds, with the spread of before as so many more.
    """
    if not history:
        return before, 0
    after = _both(history, before)
    spreads = {
        "time_spread": _spread(before.time_spread, _unseen(history, before, _step_seconds, _seconds)),
        "memory_spread": _spread(before.memory_spread, _unseen(history, before, _allocated, _peaks)),
    }
    return dataclasses.replace(after, **spreads), int(sum(np.sum(runs.repeats) for runs in history))


Figure = Callable[[Runs], Array]
Equation = Callable[[Runs, Coefficients], Array]


def _both(history: Sequence[Runs], before: Coefficients) -> Coefficients:
    everything = [np.ones(len(runs.keys), dtype=bool) for runs in history]
    timed = _fit(history, everything, before, _step_seconds, _seconds)
    return _fit(history, everything, timed, _allocated, _peaks)


def _fit(
    history: Sequence[Runs], chosen: Sequence[Array], before: Coefficients, equation: Equation, figure: Figure
) -> Coefficients:
    """The coefficients that `equation` depends on, on the chosen configurations that have the figure."""
    of_time = equation is _step_seconds
    parts = [
        (runs, at)
        for runs, mask in zip(history, chosen, strict=True)
        if len(at := np.flatnonzero(mask & np.isfinite(figure(runs))))
    ]
    if not parts:
        return before
    taken = [(dataclasses.replace(runs, cases=runs.cases.take(at)), at) for runs, at in parts]
    measured = np.concatenate([figure(runs)[at] for runs, at in parts])

    def predicted(rates: Coefficients) -> Array:
        return np.concatenate([np.broadcast_to(equation(runs, rates), len(at)) for runs, at in taken])

    fitted_names = names("time") if of_time else ALLOCATED
    return fitted(fitted_names, before, predicted, measured, TIME_NOISE if of_time else MEMORY_NOISE)


def _unseen(history: Sequence[Runs], before: Coefficients, equation: Equation, figure: Figure) -> Array:
    """log(measured / predicted) of each configuration by a fit on the other folds."""
    count = sum(len(runs.keys) for runs in history)
    fold = np.random.default_rng(0).permutation(count) % min(FOLDS, count)
    places = np.split(fold, np.cumsum([len(runs.keys) for runs in history])[:-1])
    errors = []
    for left_out in range(min(FOLDS, count)):
        rates = _fit(history, [place != left_out for place in places], before, equation, figure)
        for runs, place in zip(history, places, strict=True):
            at = np.flatnonzero((place == left_out) & np.isfinite(figure(runs)))
            predicted = np.broadcast_to(equation(runs, rates), len(runs.keys))
            errors.append(np.log(figure(runs)[at] / predicted[at]))
    return np.concatenate(errors)


def _spread(before: float, errors: Array) -> float:
    """The root of the mean square, `before` counting as `WORTH` errors. One that is far out counts as three of the others."""
    if not len(errors):
        return before
    bound = 3 * max(1.4826 * float(np.median(np.abs(errors))), before)
    kept = np.clip(errors, -bound, bound)
    return max(float(np.sqrt((WORTH * before**2 + np.sum(kept**2)) / (WORTH + len(kept)))), LEAST_SPREAD)


def _step_seconds(runs: Runs, rates: Coefficients) -> Array:
    return predict(runs.cases, rates).seconds


def _allocated(runs: Runs, rates: Coefficients) -> Array:
    return memory(runs.cases, rates).allocated


def _seconds(runs: Runs) -> Array:
    return runs.seconds


def _peaks(runs: Runs) -> Array:
    return runs.peaks
