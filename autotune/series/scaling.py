"""Strong scaling: how samples/s grow with the ranks at one global batch, and from which size more ranks do not help."""

from collections.abc import Iterable
from dataclasses import replace

from autotune.series.series import SeriesEntry, SeriesRequest, SeriesResult, Sweep, entry_of, interrupted, sizes
from autotune.session.session import Session
from search_spaces.quantities import number_text
from search_spaces.trial import Interval


def scale(series: SeriesRequest, sweep: Sweep) -> SeriesResult:
    """Run all sizes in ascending order. The answer is the one with the most samples/s."""
    skipped = list[SeriesEntry]()
    return scaled(series, sizes(series, skipped), sweep, skipped)


def scaled(
    series: SeriesRequest, sessions: Iterable[Session], sweep: Sweep, skipped: Iterable[SeriesEntry] = ()
) -> SeriesResult:
    """`scale` for given sessions, such as one number of ranks on one node and on two; the first is the reference.

    The caller also decides where they run: `sweep` starts the runner.
    """
    entries = [*skipped]
    for session in sessions:
        entries.append(entry_of(series, session, sweep(session)))
        if stopped := interrupted(series, entries):
            return stopped
    first = next((entry for entry in entries if entry.samples_per_second is not None), None)
    complete = [replace(entry, efficiency=_efficiency(entry, first)) for entry in entries]
    measured = [entry for entry in complete if entry.samples_per_second is not None]
    best = max(measured, key=_mean, default=None)
    message = (
        "no size has a configuration that may win; raise the memory limit, or add ranks" if best is None else _message(measured)
    )
    return SeriesResult(objective=series.objective, entries=tuple(complete), answer=best, message=message)


def _efficiency(entry: SeriesEntry, first: SeriesEntry | None) -> Interval | None:
    """The rate per rank relative to that of the smallest measured size.

    The bounds divide opposite bounds of the two rates, so they cover at least 95 %.
    """
    if first is None or first.samples_per_second is None or entry.samples_per_second is None:
        return None
    rate, base, share = entry.samples_per_second, first.samples_per_second, first.ranks / entry.ranks
    if entry is first:
        return Interval(mean=1.0, low=1.0, high=1.0)
    return Interval(mean=share * rate.mean / base.mean, low=share * rate.low / base.high, high=share * rate.high / base.low)


def _message(measured: list[SeriesEntry]) -> str:
    best = max(measured, key=_mean)
    first = measured[0]
    gain = "" if best is first else f", {_mean(best) / _mean(first):.2f} times as many as {_ranks(first)}"
    warnings = [f"; warning: {text}" for entry in measured if (text := _warning(entry, measured)) is not None]
    return f"most samples/s on {_ranks(best)}: {number_text(_mean(best))}{gain}{''.join(warnings)}"


def _warning(entry: SeriesEntry, measured: list[SeriesEntry]) -> str | None:
    """The warning for a size that is not faster than a smaller one."""
    smaller = [other for other in measured if (other.ranks, other.nodes) < (entry.ranks, entry.nodes)]
    rival = max(smaller, key=_mean, default=None)
    if rival is None or rival.samples_per_second is None or entry.samples_per_second is None or _mean(entry) > _mean(rival):
        return None
    apart = entry.samples_per_second.high < rival.samples_per_second.low
    slower = "slower than" if apart else "no faster than"
    rates = f"{number_text(_mean(entry))} against {number_text(_mean(rival))} samples/s"
    fewer = f"{rival.ranks}{_spread(rival)}"
    return f"{_ranks(entry)} are {slower} {fewer} ({rates}); use {fewer}"


def _mean(entry: SeriesEntry) -> float:
    return entry.samples_per_second.mean if entry.samples_per_second is not None else 0.0


def _ranks(entry: SeriesEntry) -> str:
    return f"{entry.ranks} rank{'s' if entry.ranks > 1 else ''}{_spread(entry)}"


def _spread(entry: SeriesEntry) -> str:
    return f" on {entry.nodes} nodes" if entry.nodes > 1 else ""
