"""Find the longest samples that some configuration can run: doubling, then bisection, with a short search for each length."""

from dataclasses import dataclass

from autotune.errors import RequestError
from autotune.request.request import Objective
from autotune.series.series import STEP, SeriesEntry, SeriesRequest, SeriesResult, SizeForecast, Sweep, entry_of, interrupted
from autotune.session.session import Session
from search_spaces.models.model import ModelSpec, Position
from search_spaces.outcome import JobState

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
