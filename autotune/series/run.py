"""Run the jobs of a series one after the other; the longest samples are found by doubling, then bisection."""

import math
from dataclasses import dataclass

from autotune.errors import RequestError
from autotune.request.job_fields import Objective
from autotune.series.scaling import scale
from autotune.series.series import (
    STEP,
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
from autotune.session.session import Session
from search_spaces.models.model import ModelSpec, Position
from search_spaces.outcome import JobState
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
    predicted_costs = {session.world_size: cost_of(series, session, forecast.rate(session)) for session in sessions}
    best: SeriesEntry | None = None
    for session in sorted(sessions, key=lambda candidate: (_mean(predicted_costs[candidate.world_size]), candidate.world_size)):
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


LONGEST = 1 << 24
"""Longest length that is tried, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """The known bounds of the longest length, in steps."""

    runs: int = 0
    """The longest length that ran; 0: none did."""
    fails: int | None = None
    """The shortest length that did not run; None: none failed."""
    most: int
    """The longest length that may be tried."""

    def after(self, steps: int, *, ran: bool) -> "Bracket":
        """Return the bracket after a length was tried."""
        return Bracket(runs=steps if ran else self.runs, fails=self.fails if ran else steps, most=self.most)

    @property
    def next(self) -> int | None:
        """The next length: twice the longest that ran, half of the shortest that did not, or their middle; None: done."""
        if self.fails is None:
            return min(2 * self.runs, self.most) if self.runs < self.most else None
        middle = (self.runs + self.fails) // 2
        return middle if middle > self.runs else None


def longest_sequence(series: SeriesRequest, sweep: Sweep, forecast: SizeForecast) -> SeriesResult:
    """Return the longest samples that run, to a precision of one step.

    1. Begin at the predicted longest length, or at the given length if there is no prediction.
    2. A length runs if a search for least memory finds a configuration that can win; the search stops at the first one.
    3. Double while lengths run, then bisect between the longest that ran and the shortest that did not.

    If a length does not run, longer ones are assumed not to run either.
    """
    step = series.step or STEP
    first = _session(series, None)
    if first.ranking.memory_limit_bytes is None:
        problem = "is missing for the objective sequence: a CPU enforces no limit itself"
        raise RequestError("memory_limit", problem, "give the bytes that a rank may allocate (--memory-limit)")
    bracket = Bracket(most=_most(first) // step)
    if bracket.most < 1:
        raise RequestError("step", f"{step} is beyond the {_most(first)} positions of the model", "give a smaller step")
    begin = forecast.longest(first) or first.request.sequence_length
    steps: int | None = min(max(begin // step, 1), bracket.most)
    entries = list[SeriesEntry]()
    answer: SeriesEntry | None = None
    while steps is not None:
        session = _session(series, steps * step)
        result = sweep(session)
        entries.append(entry_of(series, session, result))
        if stopped := interrupted(series, entries):
            return stopped
        ran = result.best_config is not None
        if not ran and result.state is JobState.FAILED:
            # Failed trials do not show whether the length fits.
            return _result(series, entries, answer, f"{steps * step} tokens: {result.message}; see `autotune show`")
        answer = entries[-1] if ran else answer
        bracket = bracket.after(steps, ran=ran)
        steps = bracket.next
    return _result(series, entries, answer, _message(bracket, step))


def _result(series: SeriesRequest, entries: list[SeriesEntry], answer: SeriesEntry | None, message: str) -> SeriesResult:
    return SeriesResult(objective=series.objective, entries=tuple(entries), answer=answer, message=message)


def _message(bracket: Bracket, step: int) -> str:
    if not bracket.runs:
        return f"not even {step} tokens run; raise the memory limit, add ranks, or search higher ZeRO stages and checkpointing"
    text = f"{bracket.runs * step} tokens run"
    if bracket.fails is None:
        return f"{text}, the most that is tried"
    return f"{text}, and no tried configuration runs {bracket.fails * step} (step {step})"


def _session(series: SeriesRequest, tokens: int | None) -> Session:
    changes = {"ranks": series.ranks[0]} if series.ranks else {}
    length = {} if tokens is None else {"sequence_length": tokens}
    return series.session(objective=Objective.MEMORY, stop_at_first=True, confirm_repeats=0, **changes, **length)


def _most(session: Session) -> int:
    model = session.model
    return model.sequence_length if isinstance(model, ModelSpec) and model.position is Position.LEARNED else LONGEST
