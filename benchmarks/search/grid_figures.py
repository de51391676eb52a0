"""Figures of the reference grid's measurements: noise, best configurations, and each knob's effect on the rate."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.common.paired_statistics import pooled_deviation
from benchmarks.search.grid_file import Role, Row
from executor.measurement.timing import student_t_975
from search_spaces.knob import Value
from search_spaces.trial_config import TrialConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Relative differences between measurements of one configuration."""

    reference: float
    """Standard deviation of the reference's measurements over the whole run."""
    reference_range: float
    """The reference's highest rate over its lowest, minus one."""
    references: int
    drift: float
    """Relative change of the reference from the first measurement to the last, by a linear fit."""
    drift_error: float
    """Half-width of the drift's 95 % interval."""
    repeat: float
    """Pooled standard deviation between measurements of one point."""
    freedom: int
    """Degrees of freedom of `repeat`."""
    within: float
    """Root mean square of the standard errors within the measurements."""

    @property
    def between(self) -> float:
        """Standard deviation between repeats beyond the measurements' own errors."""
        return math.sqrt(max(self.repeat**2 - self.within**2, 0.0))


def rates_of(rows: Iterable[Row]) -> dict[TrialConfig, list[float]]:
    """Configuration -> all its measured rates."""
    found: dict[TrialConfig, list[float]] = {}
    for row in rows:
        if row.rate:
            found.setdefault(row.config, []).append(row.rate)
    return found


def mean_rates(rows: Iterable[Row]) -> dict[TrialConfig, float]:
    """Configuration -> its mean rate, taken as the grid's true rate."""
    return {config: fmean(rates) for config, rates in rates_of(rows).items()}


def best_points(rows: Iterable[Row], count: int) -> list[TrialConfig]:
    """The fastest by the mean of their measurements, best first."""
    means = mean_rates(row for row in rows if not row.unstable)
    return sorted(means, key=lambda config: (-means[config], config.hash))[:count]


def remeasured_best(rows: Sequence[Row], count: int) -> list[TrialConfig]:
    """The best `count` by measurements made after they were chosen, so that none is among them only by chance;
    without such measurements, by all measurements."""
    after = mean_rates(row for row in rows if row.role is Role.TOP)
    ranked = sorted(after, key=lambda config: -after[config])
    return ranked[:count] if ranked else best_points(rows, count)


def noise_of(rows: Sequence[Row]) -> Noise:
    """Noise from the reference and the repeated points, without the first measurements of the best ten, which selected them."""
    references = [(row.order, row.rate) for row in rows if row.role is Role.REFERENCE and row.rate]
    rates = [rate for _, rate in references]
    twice = {row.config for row in rows if row.role is Role.REPEAT}
    groups = [*rates_of(row for row in rows if row.config in twice and row.role in (Role.POINT, Role.REPEAT)).values(), rates]
    groups += rates_of(row for row in rows if row.role is Role.TOP).values()
    repeat, freedom = pooled_deviation(groups)
    drift, error = _drift(references)
    return Noise(
        reference=pooled_deviation([rates])[0],
        reference_range=max(rates) / min(rates) - 1.0 if rates else 0.0,
        references=len(rates),
        drift=drift,
        drift_error=error,
        repeat=repeat,
        freedom=freedom,
        within=math.sqrt(fmean([row.within**2 for row in rows if row.rate])) if any(row.rate for row in rows) else 0.0,
    )


def best_by_value(
    rates: Mapping[TrialConfig, float], knobs: Iterable[str], matters: Callable[[str, TrialConfig], bool]
) -> dict[str, dict[Value, float]]:
    """Knob -> value -> the best rate with this value where the knob matters, as a share of the overall best."""
    best = max(rates.values())
    found: dict[str, dict[Value, float]] = {}
    for config, rate in rates.items():
        for knob in (name for name in knobs if matters(name, config)):
            value = getattr(config, knob)
            found.setdefault(knob, {})[value] = max(found.get(knob, {}).get(value, 0.0), rate / best)
    return found


def one_changed(rates: Mapping[TrialConfig, float], best: TrialConfig, knobs: Iterable[str]) -> dict[str, dict[Value, float]]:
    """Knob -> another value -> the best configuration's rate with only this knob changed, as a share of its own."""
    found: dict[str, dict[Value, float]] = {}
    for config, rate in rates.items():
        changed = config.differences(best)
        if len(changed) == 1 and (knob := next(iter(changed))) in knobs:
            found.setdefault(knob, {})[changed[knob]] = rate / rates[best]
    return found


def _drift(references: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Slope of log rate over the measurement order, times the length of the run, and its 95 % half-width."""
    if len(references) < 3:
        return 0.0, math.inf
    orders = [float(order) for order, _ in references]
    logs = [math.log(rate) for _, rate in references]
    line = statistics.linear_regression(orders, logs)
    left = [log - line.intercept - line.slope * order for order, log in zip(orders, logs, strict=True)]
    spread = math.sqrt(sum(value**2 for value in left) / (len(logs) - 2))
    length = max(orders) - min(orders)
    apart = math.sqrt(sum((order - fmean(orders)) ** 2 for order in orders))
    return line.slope * length, student_t_975(len(logs) - 2) * spread / apart * length
