"""Scores a predictor on a table: calibrate, predict, score."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from autotune.knowledge.row import TableRow, blinded
from autotune.knowledge.table import Skipped
from benchmarks.prediction.scoring.contract import Flags, Forecast, Predictor
from benchmarks.prediction.scoring.facts import Facts
from benchmarks.prediction.scoring.folds import DRAWS, Calibration, Fold, TooFew, few_rows, leave_group_out, leave_source_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The settings of a validation."""

    calibrate: Calibration = Calibration.NONE
    calibration_rows: int = 3
    """Rows per source for the fit of few-rows."""
    min_timed: int = 8
    """Timed candidates that a group needs to be ranked."""
    seed: int = 0
    assumed_noise: float = 0.01
    """Relative standard deviation for a source with too few repeats to estimate its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """Forecasts over all rows of the table, and the rows that are scored."""

    forecast: Forecast
    scored: Flags


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forecasts:
    """The predictor's forecasts: one draw, or several for few-rows."""

    draws: tuple[Draw, ...]
    skipped: tuple[Skipped, ...]
    in_sample: int
    """Rows used to fit the shipped coefficients, if these were used."""
    priors_only: int
    """Rows predicted without any row to fit on although the protocol calibrates."""


def make_forecasts(facts: Facts, predictor: Predictor, protocol: Protocol) -> Forecasts:
    """Calibrate according to the protocol and predict each row once in every draw."""
    asked = [blinded(row) for row in facts.rows]
    skipped, usable = _representable(facts, asked, predictor)
    plan, more = _plan(facts, usable, protocol)
    draws = []
    for folds in plan:
        forecast = _blank(len(facts.rows))
        scored = np.zeros(len(facts.rows), dtype=bool)
        for fold in folds:
            fitted = predictor
            if protocol.calibrate is not Calibration.NONE:
                fitted = predictor.calibrated([facts.rows[position] for position in fold.fitted])
            _fill(forecast, fitted, asked, fold.predicted)
            scored[list(fold.predicted)] = True
        draws.append(Draw(forecast=_cleaned(forecast), scored=scored))
    silent = _silent(facts, draws)
    used = [row for row, use in zip(facts.rows, usable, strict=True) if use]
    return Forecasts(
        draws=tuple(draws),
        skipped=(*skipped, *more, *silent),
        in_sample=predictor.in_sample(used) if protocol.calibrate is Calibration.NONE else 0,
        priors_only=_count_priors_only(plan, protocol),
    )


def _representable(facts: Facts, asked: Sequence[TableRow], predictor: Predictor) -> tuple[list[Skipped], Flags]:
    refusals = list(predictor.refusals(asked))
    skipped = [_skip(facts, position, why) for position, why in enumerate(refusals) if why is not None]
    return skipped, np.array([why is None for why in refusals], dtype=bool)


def _plan(facts: Facts, usable: Flags, protocol: Protocol) -> tuple[list[list[Fold]], list[Skipped]]:
    """The folds of each draw, and the rows that no draw predicts."""
    if protocol.calibrate is Calibration.LEAVE_GROUP_OUT:
        return [leave_group_out(facts, usable, protocol.min_timed)], []
    if protocol.calibrate is Calibration.LEAVE_SOURCE_OUT:
        return [leave_source_out(facts, usable)], []
    if protocol.calibrate is Calibration.FEW_ROWS:
        return _few_rows_plan(facts, usable, protocol)
    everyone = tuple(int(position) for position in np.flatnonzero(usable))
    return [[Fold(fitted=(), predicted=everyone)] if everyone else []], []


def _few_rows_plan(facts: Facts, usable: Flags, protocol: Protocol) -> tuple[list[list[Fold]], list[Skipped]]:
    plan: list[list[Fold]] = [[] for _ in range(DRAWS)]
    skipped = []
    for found in few_rows(facts, usable, protocol.calibration_rows, protocol.seed):
        if isinstance(found, TooFew):
            why = f"its source has {found.measured} measured configurations: too few to fit on {protocol.calibration_rows}"
            skipped += [_skip(facts, position, f"{why} and score the rest") for position in found.rows]
            continue
        for folds, fold in zip(plan, found, strict=True):
            folds.append(fold)
    return plan, skipped


def _blank(count: int) -> Forecast:
    return Forecast(**{field.name: np.full(count, np.nan) for field in fields(Forecast)})


def _fill(forecast: Forecast, predictor: Predictor, asked: Sequence[TableRow], positions: Sequence[int]) -> None:
    if not positions:
        return
    part, at = predictor.forecast([asked[position] for position in positions]), list(positions)
    for field in fields(Forecast):
        getattr(forecast, field.name)[at] = getattr(part, field.name)


def _cleaned(forecast: Forecast) -> Forecast:
    """Replace non-positive and non-finite numbers by NaN."""
    for field in fields(Forecast):
        values = getattr(forecast, field.name)
        possible = values >= 0 if field.name == "fit_probability" else values > 0
        values[~(np.isfinite(values) & possible)] = np.nan
    return forecast


def _silent(facts: Facts, draws: Sequence[Draw]) -> list[Skipped]:
    """Rows without any prediction although not refused; they are not scored."""
    found = np.zeros(len(facts.rows), dtype=bool)
    for draw in draws:
        silent = draw.scored & np.isnan(draw.forecast.step_seconds) & np.isnan(draw.forecast.memory_bytes)
        draw.scored[silent] = False
        found |= silent
    return [_skip(facts, int(position), "the predictor gives neither time nor memory") for position in np.flatnonzero(found)]


def _count_priors_only(plan: Sequence[Sequence[Fold]], protocol: Protocol) -> int:
    if protocol.calibrate is Calibration.NONE:
        return 0
    return sum(len(fold.predicted) for fold in plan[0] if not fold.fitted) if plan else 0


def _skip(facts: Facts, position: int, reason: str) -> Skipped:
    row = facts.rows[position]
    return Skipped(row_id=row.row_id, line=row.line, reason=reason)
