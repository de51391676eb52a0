"""Run the jobs of a series, one after the other."""

import math

from autotune.series.longest import longest_sequence
from autotune.series.scaling import scale
from autotune.series.series import (
    SeriesEntry,
    SeriesObjective,
    SeriesRequest,
    SeriesResult,
    SizeForecast,
    Sweep,
    cost_of,
    entry_of,
    interrupted,
    interval_text,
    sizes,
    skipped,
)
from search_spaces.trial import Interval


def run_series(series: SeriesRequest, sweep: Sweep, forecast: SizeForecast) -> SeriesResult:
    """Run the jobs of a series, one after the other.

    Raises:
        RequestError, SearchSpaceError: a job cannot be opened; raised before the first trial.
        NothingFeasibleError: no length can fit.
    """
    match series.objective:
        case SeriesObjective.COST:
            return _cheapest(series, sweep, forecast)
        case SeriesObjective.DEVICES:
            return _fewest(series, sweep)
        case SeriesObjective.SCALE:
            return scale(series, sweep)
        case SeriesObjective.SEQUENCE:
            return longest_sequence(series, sweep, forecast)


def _fewest(series: SeriesRequest, sweep: Sweep) -> SeriesResult:
    """Run sizes in ascending order, until the lower bound of the best rate's interval reaches the requested rate."""
    target, entries = series.rate or 0.0, list[SeriesEntry]()
    for session in sizes(series, entries):
        entries.append(entry_of(series, session, sweep(session)))
        if stopped := interrupted(series, entries):
            return stopped
        reached = entries[-1].samples_per_second
        if reached is not None and reached.low >= target:
            message = f"{entries[-1].ranks} ranks reach {target:g} samples/s: {interval_text(reached)}"
            return SeriesResult(objective=series.objective, entries=tuple(entries), answer=entries[-1], message=message)
    return SeriesResult(objective=series.objective, entries=tuple(entries), answer=None, message=_unreached(target, entries))


def _unreached(target: float, entries: list[SeriesEntry]) -> str:
    measured = [(entry.samples_per_second, entry) for entry in entries if entry.samples_per_second is not None]
    if not measured:
        return "no size has a configuration that may win; raise the memory limit, or add ranks"
    rate, best = max(measured, key=lambda item: item[0].mean)
    text = f"no size reaches {target:g} samples/s: the most is {interval_text(rate)} on {best.ranks} ranks"
    if rate.mean >= target:
        return f"{text}, whose interval is not above it; raise --confirm-repeats or --trial-seconds"
    return f"{text}; add ranks, search a larger space or with more trials, or lower the rate"


def _cheapest(series: SeriesRequest, sweep: Sweep, forecast: SizeForecast) -> SeriesResult:
    """Run the sizes, the predicted cheapest first, and skip those whose predicted band is above the best measured cost."""
    entries = list[SeriesEntry]()
    sessions = list(sizes(series, entries))
    known = {session.world_size: cost_of(series, session, forecast.rate(session)) for session in sessions}
    best: SeriesEntry | None = None
    for session in sorted(sessions, key=lambda each: (_mean(known[each.world_size]), each.world_size)):
        # Predict again, because predictions may have learned from the trials of earlier sizes.
        expected = cost_of(series, session, forecast.rate(session)) if best is not None else None
        if best is not None and best.cost is not None and expected is not None and expected.low > best.cost.high:
            measured = f"{interval_text(best.cost)} of {best.ranks} ranks"
            why = f"skipped: predicted to cost at least {expected.low:.4g}, over the {measured}"
            entries.append(skipped(session.world_size, session.request.sequence_length, why))
            continue
        entries.append(entry_of(series, session, sweep(session)))
        if stopped := interrupted(series, entries):
            return stopped
        if _mean(entries[-1].cost) < _mean(best.cost if best else None):
            best = entries[-1]
    if best is None or best.cost is None:
        message = "no size has a configuration that may win; raise the memory limit, or add ranks"
    else:
        message = f"a million tokens cost least on {best.ranks} ranks: {interval_text(best.cost)}"
    return SeriesResult(objective=series.objective, entries=tuple(entries), answer=best, message=message)


def _mean(cost: Interval | None) -> float:
    return math.inf if cost is None else cost.mean
