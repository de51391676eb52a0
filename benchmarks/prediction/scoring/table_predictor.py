"""The analytic model as a predictor of tables of measurements, and its calibration on their rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autotune.knowledge.row import TableRow, peak_bytes, step_seconds
from autotune.knowledge.row_cases import adapts, cases_of_rows, described, numbers_of, refusal, row_software
from autotune.knowledge.row_names import find_device
from autotune.prediction.equations.cases import RECOMPUTE, Array, Cases, Flags
from autotune.prediction.equations.coefficients import Coefficients, fitted_sources, names, shipped_rates
from autotune.prediction.equations.memory import Memory, memory
from autotune.prediction.equations.parameters import stage_parameters
from autotune.prediction.equations.step import Z90, StepPrediction, doubt, predict, seconds_of
from autotune.prediction.fitting.trial_fit import WORTH, fitted
from autotune.prediction.planning.memory_fit import fit_probability
from benchmarks.prediction.scoring.contract import Forecast
from benchmarks.prediction.scoring.residual import FEWEST, Residual, learned

_GENERIC = Coefficients()
"""The prior without any measurement."""
_Stack = tuple[str, tuple[float, ...]]
_MOST = 400
"""Maximum number of rows for a fit; more hardly change the result."""
_SOURCE_WEIGHT = {"time": 3.0, "memory": 3.0}
"""Maximum weight of a source, in rows, if several are fitted together: their memory use is specific to their software."""
_TIME_NOISE, _MEMORY_NOISE = 0.08, 0.12
_SOURCE_NOISE = 0.3
"""Standard deviation of the logarithm between sources, from effects that no coefficient represents."""
_LEAST_UTILIZATION = 0.01
"""Share of the device's peak below which a run was disturbed: its time says nothing about the terms that are fitted."""
ALIKE = 0.8
"""Likeness of a source on the same device with the same software (`Runs.likeness`)."""
_HALF_PRIOR_ROWS = 4.0
"""Number of rows at which a band's spread is half measured and half prior."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """The fit for one source."""

    rates: Coefficients
    residual: Residual | None = None
    memory_residual: Residual | None = None
    offset: float = 0.0
    """Common logarithm of measured / predicted time of the source's rows, if there are too few for a residual."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Described:
    """Components of the predictions for rows of one source; arrays over the rows."""

    cases: Cases
    prediction: StepPrediction
    """By the equations only."""
    learned: Array
    """Correction of the logarithm of the equations' seconds, learned from the calibration rows."""
    fullest: Memory
    """Memory of the fullest rank, independent of the rank that a table reports."""
    beyond: Array
    """Factor on its bytes, learned from the calibration rows."""
    rates: Coefficients


@dataclass(frozen=True, kw_only=True)
class TablePredictor:
    """Predicts rows of tables. Rows of a source in the calibration are predicted by the fit to that source."""

    known: tuple[TableRow, ...] | None = None
    """Calibration rows; None: the shipped coefficients."""
    knowledge: tuple[TableRow, ...] = ()
    """Rows of other tables and jobs that every calibration has too. A source that is not in the calibration is predicted by
    the fit to the source of the knowledge with the same device and software."""
    before: Coefficients = _GENERIC
    """The prior of fits."""
    disturb: Callable[[Coefficients], Coefficients] | None = None
    """Modifies the coefficients after the fit: to test strategies that rely on wrong ones."""
    _fits: dict[str, _Fit] = field(default_factory=dict, repr=False, compare=False)

    def in_sample(self, rows: Sequence[TableRow]) -> int:
        """The number of rows from sources used to fit the shipped coefficients."""
        shipped = self.known is None or self.before == shipped_rates()
        return sum(row.source in fitted_sources() for row in rows) if shipped else 0

    def refusals(self, rows: Sequence[TableRow]) -> list[str | None]:
        """Why each row cannot be represented; None: it can."""
        return [refusal(row) for row in rows]

    def calibrated(self, rows: Sequence[TableRow]) -> "TablePredictor":
        """A predictor that uses only these rows and generic priors."""
        return TablePredictor(known=(*rows, *self.knowledge), knowledge=self.knowledge, disturb=self.disturb)

    def informed(self, rows: Sequence[TableRow]) -> "TablePredictor":
        """A predictor that learns from these rows, from the shipped coefficients on, and adds them to every calibration."""
        kept = tuple(row for row in rows if refusal(row) is None)
        return TablePredictor(known=kept, knowledge=kept, before=shipped_rates(), disturb=self.disturb)

    def disturbed(self, disturb: Callable[[Coefficients], Coefficients] | None) -> "TablePredictor":
        """The same predictor with disturbed coefficients; fits are reused."""
        return replace(self, disturb=disturb)

    def forecast(self, rows: Sequence[TableRow]) -> Forecast:
        """Time, memory and verdict of each row, with 90 % bands."""
        found: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            found.setdefault(row.source, []).append(index)
        columns = {name: np.empty(len(rows)) for name in Forecast.__dataclass_fields__}
        for indices in found.values():
            for name, values in self._forecast([rows[index] for index in indices]).items():
                columns[name][indices] = values
        return Forecast(**columns)

    def described(self, rows: Sequence[TableRow]) -> Described:
        """Components of the predictions for rows of one source that are not refused."""
        fit = self._fit(rows[0])
        cases = _resolved(cases_of_rows(rows), rows, fit.rates)
        return Described(
            cases=cases,
            prediction=predict(cases, fit.rates),
            learned=fit.residual(cases) if fit.residual else np.full(len(rows), fit.offset),
            fullest=memory(_on_fullest_rank(cases), fit.rates),
            beyond=np.exp(fit.memory_residual(cases)) if fit.memory_residual else np.ones(len(rows)),
            rates=fit.rates,
        )

    def _forecast(self, rows: Sequence[TableRow]) -> dict[str, Array]:
        found = self.described(rows)
        seconds = found.prediction.seconds * np.exp(found.learned)
        read = as_read(found.prediction.memory, rows) * found.beyond
        rates, needed = found.rates, found.fullest.needed * found.beyond
        time_reach, memory_reach = found.prediction.time_reach, found.prediction.memory_reach
        return {
            "step_seconds": seconds,
            "step_seconds_low": seconds * np.exp(-time_reach),
            "step_seconds_high": seconds * np.exp(time_reach),
            "memory_bytes": read,
            "memory_bytes_low": read * np.exp(-memory_reach),
            "memory_bytes_high": read * np.exp(memory_reach),
            "fit_probability": fit_probability(
                needed, found.fullest.usable(_on_fullest_rank(found.cases)), rates.memory_spread
            ),
        }

    def _fit(self, row: TableRow) -> _Fit:
        known = self.known is not None and row.source in self._sources
        own = row.source if known else self._alike.get(_stack(row), "")
        fit = self._fits.get(own)
        if fit is None:
            fit = self._fits[own] = self._fitted(own)
        rates = fit.rates if known or not self.knowledge else _no_surer(fit.rates, self.before, ALIKE if own else 0.0)
        return replace(fit, rates=self.disturb(rates) if self.disturb else rates)

    def _fitted(self, own: str) -> _Fit:
        if self.known is None:
            return _Fit(rates=shipped_rates())
        return _fitted_on([row for row in self.known if row.source == own] if own else self.known, bool(own), self.before)

    @cached_property
    def _alike(self) -> dict[_Stack, str]:
        """Device and software -> the source with most rows of them among the knowledge."""
        counts = Counter((_stack(row), row.source) for row in self.knowledge)
        return {stack: source for (stack, source), _ in reversed(counts.most_common())}

    @cached_property
    def _sources(self) -> frozenset[str]:
        return frozenset(row.source for row in self.known or ())


def _no_surer(rates: Coefficients, before: Coefficients, likeness: float) -> Coefficients:
    """The coefficients with the bands before these measurements of others, as far as their errors are not those of what is
    predicted: together they count as likeness / (1 - likeness) errors, the band before as `WORTH`.
    """
    worth = likeness / (1 - likeness) / WORTH
    reaches = {
        quantity: [getattr(each, f"{quantity}_spread") * getattr(each, f"{quantity}_tail") for each in (rates, before)]
        for quantity in ("time", "memory")
    }
    tails = {
        f"{quantity}_tail": max(float(np.sqrt((worth * own**2 + wide**2) / (worth + 1))), own)
        / getattr(rates, f"{quantity}_spread")
        for quantity, (own, wide) in reaches.items()
    }
    return replace(rates, **tails, time_doubt=max(rates.time_doubt, before.time_doubt / (worth + 1)))


def _stack(row: TableRow) -> _Stack:
    """What fits depend on beside the configuration: the device and the features of the software."""
    found = find_device(row.gpu_type or "")
    return found[1].name if found else "", tuple(numbers_of(row_software(described(row))).values())


def _on_fullest_rank(cases: Cases) -> Cases:
    """The cases with the memory of the fullest rank, independent of the reported one."""
    return replace(cases, software=replace(cases.software, measured_rank=0 * cases.software.measured_rank))


def _resolved(cases: Cases, rows: Sequence[TableRow], rates: Coefficients) -> Cases:
    """Add the least recomputation that fits, else sharded parameters, where a row does not state them."""
    adapting = np.array([adapts(row) for row in rows])
    recomputes = adapting & np.array([row.recompute is None for row in rows])
    divides = adapting & np.array([row.zero_stage is None for row in rows])
    if not (recomputes | divides).any():
        return cases
    for level in range(1, len(RECOMPUTE)):
        cases = _with_layout(cases, "activation_checkpointing", level, recomputes & ~_fits(cases, rates))
    cases = _with_layout(cases, "zero_stage", 3, divides & ~_fits(cases, rates))
    cases = _with_layout(cases, "activation_checkpointing", 0, recomputes & divides & (cases.layouts.zero_stage == 3))
    return _with_layout(cases, "activation_checkpointing", 2, recomputes & divides & ~_fits(cases, rates))


def _fits(cases: Cases, rates: Coefficients) -> Flags:
    return memory(_on_fullest_rank(cases), rates).fits(cases)


def _with_layout(cases: Cases, name: str, value: float, chosen: Flags) -> Cases:
    changed = np.where(chosen, value, getattr(cases.layouts, name))
    return replace(cases, layouts=replace(cases.layouts, **{name: changed}))


def as_read(held: Memory, rows: Sequence[TableRow]) -> Array:
    """Convert a memory prediction to each row's kind of reading: bytes allocated, reserved, or used on the device."""
    kinds = [(row.mem_kind or "").lower() for row in rows]
    device = np.array(["smi" in kind or "gb as printed" in kind for kind in kinds])
    reserved = np.array(["reserved" in kind for kind in kinds]) | device
    beyond = np.where(reserved, held.by_tag["reserved"], 0.0) + np.where(device, held.by_tag["context"], 0.0)
    read: Array = held.allocated + beyond
    return read


def fitted_rates(rows: Sequence[TableRow], *, together: bool, before: Coefficients = _GENERIC) -> Coefficients:
    """Coefficients fitted to rows; `together`: rows of several sources, with equal total weights; `before`: the prior."""
    rates = _fit_memory(rows, before, together)
    return _fit_time(rows, rates, together)


def _fitted_on(rows: Sequence[TableRow], own: bool, before: Coefficients) -> _Fit:
    """Fit the rows of one source: coefficients and residuals. For several sources: only coefficients."""
    rates = fitted_rates(rows, together=not own, before=before)
    timed = [row for row in rows if step_seconds(row)]
    held = [row for row in rows if peak_bytes(row)]
    beyond = _memory_residual(held, rates) if own and len(held) >= FEWEST else None
    if not own or not timed:
        return _Fit(rates=rates, memory_residual=beyond)
    cases = _resolved(cases_of_rows(timed), timed, rates)
    errors = np.log(_times(timed) / seconds_of(cases, rates))
    if len(timed) < FEWEST:
        return _Fit(rates=rates, memory_residual=beyond, offset=float(errors.sum() / (len(timed) + 1.0)))
    return _Fit(rates=rates, memory_residual=beyond, residual=learned(cases, errors))


def _memory_residual(held: Sequence[TableRow], rates: Coefficients) -> Residual:
    cases = _resolved(cases_of_rows(held), held, rates)
    read = as_read(memory(cases, rates), held)
    return learned(cases, np.log(np.array([peak_bytes(row) or 0.0 for row in held]) / read))


def _fit_time(rows: Sequence[TableRow], before: Coefficients, together: bool) -> Coefficients:
    """Fit twice: the second time with the noise found by the first."""
    timed = _spread_out(_undisturbed(rows))
    if not timed:
        return before
    cases, measured = _resolved(cases_of_rows(timed), timed, before), _times(timed)
    weights = _weights(timed, _SOURCE_WEIGHT["time"] if together else None)
    noise, rates, fit_names = _SOURCE_NOISE if together else _TIME_NOISE, before, names("time", shared=together)
    for _ in range(2):
        rates = fitted(fit_names, before, lambda tried: seconds_of(cases, tried), measured, noise, weights)
        left = np.log(measured / seconds_of(cases, rates))
        spread = _spread(left, timed, before.time_spread)
        if spread < 1.5 * noise:
            break
        noise = min(spread, 0.2)
    remaining = before.time_doubt * (1.0 if together else _HALF_PRIOR_ROWS / (len(timed) + _HALF_PRIOR_ROWS))
    if together:
        left = _left_out(fit_names, before, rates, lambda tried: seconds_of(cases, tried), measured, noise, timed)
    left = left / (1 + remaining * (doubt(cases, rates) - 1))
    tail = _tail(left, timed, spread, before.time_tail)
    return replace(rates, time_spread=spread, time_tail=tail, time_doubt=remaining)


def _left_out(
    fit_names: Sequence[str], before: Coefficients, rates: Coefficients, predicted: Callable[[Coefficients], Array],
    measured: Array, noise: float, rows: Sequence[TableRow],
) -> Array:  # fmt: skip
    """log(measured / predicted) of each row by the fit to all sources but its own: what a source that no fit saw can expect.
    `rates`: of the fit to all, from which these begin.
    """
    weights, sources = _weights(rows, _SOURCE_WEIGHT["time"]), np.array([row.source for row in rows])
    left = np.log(measured / predicted(rates))
    for source in dict.fromkeys(sources) if len(set(sources)) > 1 else ():
        own = sources == source
        without = fitted(fit_names, before, predicted, measured, noise, np.where(own, 0.0, weights), rates)
        left[own] = np.log(measured / predicted(without))[own]
    return left


def _undisturbed(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows with a time that use at least `_LEAST_UTILIZATION` of the devices' peak, or a tenth of the source's best.

    Six FLOPs per parameter and token.
    """
    timed = [row for row in rows if step_seconds(row)]
    if not timed:
        return []
    cases = cases_of_rows(timed)
    held = stage_parameters(cases, cases.shapes.layers, np.ones(1), np.ones(1))
    tokens = np.array([(row.samples_per_step or 1) * (row.seq_len or 1) / (row.num_gpus or 1) for row in timed])
    flops = 6 * (held.trained + held.frozen) * cases.layouts.tensor * tokens
    used = flops / (_times(timed) * cases.hardware.peak)
    most: dict[str, float] = {}
    for row, share in zip(timed, used, strict=True):
        most[row.source] = max(most.get(row.source, 0.0), float(share))
    # Small models never use much: theirs is compared with the source's best.
    least = {source: min(_LEAST_UTILIZATION, share / 10) for source, share in most.items()}
    return [row for row, share in zip(timed, used, strict=True) if share >= least[row.source]]


def _fit_memory(rows: Sequence[TableRow], before: Coefficients, together: bool) -> Coefficients:
    held = _spread_out([row for row in rows if peak_bytes(row)])
    if not held:
        return before
    cases, measured = cases_of_rows(held), np.array([peak_bytes(row) or 0.0 for row in held])

    def predicted(tried: Coefficients) -> Array:
        return as_read(memory(cases, tried), held)

    weights = _weights(held, _SOURCE_WEIGHT["memory"] if together else None)
    rates = fitted(names("memory", shared=together), before, predicted, measured, _MEMORY_NOISE, weights)
    left = np.log(measured / predicted(rates))
    spread = _spread(left, held, before.memory_spread, mean=True)
    if together:
        left = _left_out(names("memory", shared=True), before, rates, predicted, measured, _MEMORY_NOISE, held)
    return replace(rates, memory_spread=spread, memory_tail=_tail(left, held, spread, before.memory_tail))


def _spread_out(rows: Sequence[TableRow]) -> list[TableRow]:
    """At most `_MOST` of the rows, deterministically chosen: of each source as many, or all."""
    if len(rows) <= _MOST:
        return list(rows)
    order: dict[str, list[int]] = {}
    for index in np.random.default_rng(0).permutation(len(rows)):
        order.setdefault(rows[index].source, []).append(int(index))
    turns = sorted((turn, index) for places in order.values() for turn, index in enumerate(places))
    return [rows[index] for index in sorted(index for _, index in turns[:_MOST])]


def _weights(rows: Sequence[TableRow], each: float | None) -> Array | None:
    if each is None:
        return None
    counts = Counter(row.source for row in rows)
    return np.array([min(1.0, each / counts[row.source]) for row in rows])


def _times(rows: Sequence[TableRow]) -> Array:
    return np.array([step_seconds(row) or 0.0 for row in rows])


def _spread(left: NDArray[np.float64], rows: Sequence[TableRow], before: float, *, mean: bool = False) -> float:
    """Standard deviation by the median of each source, for the median source, shrunk to the prior if there are few rows.

    `mean`: for the mean source. Verdicts of a source left out need it, since a few sources are off by far more than most.
    """
    sources = {row.source for row in rows}
    own = [np.abs(left[[row.source == source for row in rows]]) for source in sources]
    each = [np.median(errors) for errors in own]
    return _shrunk(1.4826 * float(np.mean(each) if mean else np.median(each)), len(left), before)


def _tail(left: NDArray[np.float64], rows: Sequence[TableRow], spread: float, before: float) -> float:
    """The 90 % quantile of the errors, each source having the same weight, over that of a normal distribution with the spread.

    At least 1; shrunk to the prior if there are few rows.
    """
    counts = Counter(row.source for row in rows)
    order = np.argsort(np.abs(left))
    share = np.cumsum([1.0 / counts[rows[place].source] for place in order]) / len(counts)
    edge = float(np.abs(left)[order[int(np.searchsorted(share, 0.9 - 1e-12))]])
    return _shrunk(max(edge / (Z90 * spread), 1.0), len(left), before)


def _shrunk(found: float, rows: int, before: float) -> float:
    """The mean of what so many rows say and of the prior."""
    return (rows * found + _HALF_PRIOR_ROWS * before) / (rows + _HALF_PRIOR_ROWS)
