"""Run the jobs of a series one after the other, by predictions for its sizes; the longest samples are bisected."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, RequestError
from autotune.forecast import question_of_session
from autotune.frameworks.best_config import best_config_text
from autotune.loop.listener import LoopListener
from autotune.output import require_writable, write_whole
from autotune.prediction.planning.calibrated import asked_here
from autotune.prediction.planning.largest import Dimension, largest
from autotune.prediction.planning.memory_fit import PROBABILITY
from autotune.prediction.planning.plan import PlanOptions, plan
from autotune.prediction.planning.question import Question
from autotune.prediction.planning.scan import Bounds
from autotune.ray_cluster import with_address
from autotune.request.job_fields import Objective
from autotune.request.rows import request_from_fields
from autotune.series import (
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
    sizes,
    skipped,
)
from autotune.session.resolve import resolve
from autotune.session.session import Session
from autotune.text.rows import rate_text
from autotune.tuning import run_new_job
from search_spaces.errors import SearchSpaceError
from search_spaces.models.model import ModelSpec, Position
from search_spaces.outcome import JobState
from search_spaces.quantities import number_text
from search_spaces.trial import Interval
from storage.address import default_database_url
from storage.store import open_store


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
            message = f"{entries[-1].ranks} ranks reach {target:g} samples/s: {rate_text(reached)}"
            return _result(series, entries, entries[-1], message)
    return _result(series, entries, None, _unreached(target, entries))


def _unreached(target: float, entries: list[SeriesEntry]) -> str:
    measured = [(entry.samples_per_second, entry) for entry in entries if entry.samples_per_second is not None]
    if not measured:
        return "no size has a configuration that may win; raise the memory limit, or add ranks"
    rate, best = max(measured, key=lambda item: item[0].mean)
    text = f"no size reaches {target:g} samples/s: the most is {rate_text(rate)} on {best.ranks} ranks"
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
            measured = f"{rate_text(best.cost)} of {best.ranks} ranks"
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
        message = f"a million tokens cost least on {best.ranks} ranks: {rate_text(best.cost)}"
    return _result(series, entries, best, message)


def _mean(cost: Interval | None) -> float:
    return math.inf if cost is None else cost.mean


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
    changes: dict[str, Any] = {"ranks": series.ranks[0]} if series.ranks else {}
    changes |= {"objective": Objective.MEMORY, "stop_at_first": True, "confirm_repeats": 0}
    if tokens is None:  # the length is what is searched for, so that nobody need state one
        return resolve(request_from_fields({**series.fields, **changes}))
    return series.session(**changes, sequence_length=tokens)


def _most(session: Session) -> int:
    model = session.model
    return model.sequence_length if isinstance(model, ModelSpec) and model.position is Position.LEARNED else 1 << 24  # tokens


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
    best = max(measured, key=_rate_of_entry, default=None)
    message = (
        "no size has a configuration that may win; raise the memory limit, or add ranks"
        if best is None
        else _scaling_message(measured)
    )
    return _result(series, complete, best, message)


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


def _scaling_message(measured: list[SeriesEntry]) -> str:
    best = max(measured, key=_rate_of_entry)
    first = measured[0]
    gain = "" if best is first else f", {_rate_of_entry(best) / _rate_of_entry(first):.2f} times as many as {_ranks(first)}"
    warnings = [f"; warning: {text}" for entry in measured if (text := _warning(entry, measured)) is not None]
    return f"most samples/s on {_ranks(best)}: {number_text(_rate_of_entry(best))}{gain}{''.join(warnings)}"


def _warning(entry: SeriesEntry, measured: list[SeriesEntry]) -> str | None:
    """The warning for a size that is not faster than a smaller one."""
    smaller = [other for other in measured if (other.ranks, other.nodes) < (entry.ranks, entry.nodes)]
    rival = max(smaller, key=_rate_of_entry, default=None)
    if (
        rival is None
        or rival.samples_per_second is None
        or entry.samples_per_second is None
        or _rate_of_entry(entry) > _rate_of_entry(rival)
    ):
        return None
    apart = entry.samples_per_second.high < rival.samples_per_second.low
    slower = "slower than" if apart else "no faster than"
    rates = f"{number_text(_rate_of_entry(entry))} against {number_text(_rate_of_entry(rival))} samples/s"
    fewer = f"{rival.ranks}{_spread(rival)}"
    return f"{_ranks(entry)} are {slower} {fewer} ({rates}); use {fewer}"


def _rate_of_entry(entry: SeriesEntry) -> float:
    return entry.samples_per_second.mean if entry.samples_per_second is not None else 0.0


def _ranks(entry: SeriesEntry) -> str:
    return f"{entry.ranks} rank{'s' if entry.ranks > 1 else ''}{_spread(entry)}"


def _spread(entry: SeriesEntry) -> str:
    return f" on {entry.nodes} nodes" if entry.nodes > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EquationForecast:
    """Predicts if the model's shape is known and its space is small enough to scan."""

    _MOST_PREDICTED = 2_000_000
    """Most configurations that are examined for a size; this takes some seconds."""

    database: str

    def rate(self, session: Session) -> Interval | None:
        """Samples/s of the best plan."""
        question = self._question(session)
        if question is None:
            return None
        try:
            plan_result = plan(question, PlanOptions(top=1), Bounds(configurations=self._MOST_PREDICTED))
        except (AutotuneError, SearchSpaceError):  # too many, or none is predicted to fit: trials decide instead
            return None
        return plan_result.plans[0].estimate.samples_per_second

    def longest(self, session: Session) -> int | None:
        """Tokens of the longest samples for which a configuration is predicted to fit."""
        question = self._question(session)
        if question is None:
            return None
        try:
            return largest(question, Dimension.SEQUENCE_LENGTH, PROBABILITY, Bounds(configurations=self._MOST_PREDICTED)).value
        except (AutotuneError, SearchSpaceError):
            return None

    def _question(self, session: Session) -> Question | None:
        question = question_of_session(session)
        if question is None:
            return None
        with open_store(self.database) as store:
            return asked_here(store, dataclasses.replace(question, pins=session.request.pins))


def tune_series(
    model: str,
    *,
    objective: str,
    ranks: int | Sequence[int] = (),
    price: float | None = None,
    rate: float | None = None,
    step: int | None = None,
    out: str | Path | None = None,
    database: str | None = None,
    listener: LoopListener | None = None,
    **fields: Any,
) -> SeriesResult:
    """Find the cheapest number of ranks, the fewest that reach a rate, or the longest samples that run.

    Args:
        model: as in `autotune.tune`.
        objective: `cost` (with `price`), `devices` (with `rate`) or `sequence` (with `memory_limit` on a CPU).
        ranks: the sizes to compare; objective `sequence`: at most one.
        price: price of a device per hour, in any currency.
        rate: samples/s to reach.
        step: precision of the longest sample in tokens; None: 128.
        out: file for the answer's best configuration; None: it is not written.
        database: URL or path; None: AUTOTUNE_DB, else a file in the user's data folder.
        fields: other fields of `autotune.request.request.JobRequest`, for every job.

    Raises:
        AutotuneError, SearchSpaceError, StorageError, ExecutorError: a one-line message with the remedy.
    """
    if out is not None:
        require_writable(Path(out))
    database_url = database or default_database_url()
    series = SeriesRequest(
        objective=objective,  # type: ignore[arg-type]  # it checks the name itself
        fields=with_address({**fields, "model": model}), ranks=(ranks,) if isinstance(ranks, int) else tuple(ranks),
        price=price, rate=rate, step=step,
    )  # fmt: skip
    series_result = run_series(
        series, lambda session: run_new_job(session, database_url, listener=listener), EquationForecast(database=database_url)
    )
    if out is not None and series_result.best_config is not None:
        write_whole(Path(out), best_config_text(series_result.best_config))
    return series_result
