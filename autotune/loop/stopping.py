"""When a search is over before its trials are spent: seconds, device-hours, and what further trials may still bring."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.loop.environment_stage import reserved_seconds
from autotune.loop.failure_causes import kind_of_failure
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.session.session import Session
from autotune.strategies.strategy import Outlook
from search_spaces.outcome import Outcome, Purpose, StopReason
from search_spaces.trial_config import TrialConfig

FINALISTS = 3
"""Winner, runner-up and baseline: trials of one round of confirmation."""
SURE = 0.95
"""How sure it must be that nothing untried is faster by more than the margin."""
ALIKE = 3
"""Trials, the baseline first, after whose one and the same error no other configuration is expected to run."""
BREAKING = (Outcome.FAILED, Outcome.TIMEOUT, Outcome.LOST)
"""Outcomes of which one cause may stop a job. What does not fit is a finding, and other configurations may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonCause:
    """What every trial so far failed of."""

    name: str | None
    """Of its row in the failure table; None: the table has none."""
    message: str
    """The line of the first trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why the search is over."""

    reason: StopReason
    message: str
    """What was found that ends it, without how many trials it took."""


def stop_of(session: Session, book: JobSnapshot) -> Stop | None:
    """Why no further search trial is wanted though there are trials left; None: the search goes on.

    0. The baseline and those after it failed of one and the same cause: it is no configuration's.
    1. One that runs was all that was asked for.
    2. The seconds or the device-hours of the request are spent, but for the last stage and one round of confirmation.
    3. `run_device_hours`: what the next trial is expected to save in a run of so many device-hours is less than it costs.
    4. `stop_margin`: it is 95 % sure that nothing untried is faster by more than that.

    The last two ask the strategy, where it predicts, and follow from the rows as its proposals do.
    """
    request = session.request
    if fails_alike(book):
        return Stop(reason=StopReason.EXHAUSTED, message=f"the first {ALIKE} trials failed alike")
    if request.stop_at_first and session.ranking.ranked(book.searched):
        return Stop(reason=StopReason.FOUND, message="a configuration runs")
    if (out_of_time := time_is_up(session, book, reserved_seconds(session, book))) is not None:
        return out_of_time
    if request.run_device_hours is None and request.stop_margin is None:
        return None
    expected = outlook_of(session, book)
    return None if expected is None else _not_worth_it(session, expected) or _sure(session, expected)


def time_is_up(session: Session, book: JobSnapshot, reserved: float = 0.0) -> Stop | None:
    """Which budget of time is spent, but for `reserved` seconds and one round of confirmation; None: none is."""
    request = session.request
    seconds = _spent_seconds(session, book) + reserved
    if request.max_seconds is not None and seconds >= request.max_seconds:
        return Stop(reason=StopReason.BUDGET, message=f"{request.max_seconds:g} s are spent")
    if request.device_hours is not None and session.device_hours(seconds) >= request.device_hours:
        return Stop(reason=StopReason.BUDGET, message=f"{request.device_hours:g} device-hours are spent")
    return None


def fails_alike(book: JobSnapshot) -> bool:
    """Whether every trial so far, and enough of them, ended for one and the same cause."""
    ended = [trial for trial in book.searched if trial.outcome is not None]
    return len(ended) >= ALIKE and common_cause(book) is not None


def common_cause(book: JobSnapshot) -> CommonCause | None:
    """The first trial's cause, where every one failed of the same kind; None: they differ, or one ran, or did not fit."""
    ended = [trial for trial in book.searched if trial.outcome is not None]
    results = [trial.result for trial in ended if trial.outcome in BREAKING and trial.result is not None]
    if not results or len(results) < len(ended):
        return None
    alike = len({kind_of_failure(result) for result in results}) == 1
    first = results[0]
    return CommonCause(name=first.cause, message=first.message) if alike and first.message else None


def outlook_of(session: Session, book: JobSnapshot) -> Outlook | None:
    """What the strategy expects of further trials; None: it does not predict, or nothing was measured."""
    margin = session.request.stop_margin or 0.0
    return session.strategy.outlook(
        session.space, session.without_environment_stage(book.searched), pending_layouts(session, book), margin
    )


def _spent_seconds(session: Session, book: JobSnapshot) -> float:
    """Of active time, with one round of confirmation, which must still fit."""
    reserve = FINALISTS * book.mean_seconds if session.request.confirm_repeats else 0.0
    return book.job.active_seconds + reserve


def _not_worth_it(session: Session, expected: Outlook) -> Stop | None:
    hours = session.request.run_device_hours
    if hours is None:
        return None
    saved = hours * expected.expected_gain / (1 + expected.expected_gain)
    cost = session.device_hours(expected.trial_seconds)
    if saved >= cost:
        return None
    told = f"the next trial costs {cost:.2g} device-hours and is expected to save {saved:.2g} of {hours:g}"
    return Stop(reason=StopReason.CONVERGED, message=told)


def _sure(session: Session, expected: Outlook) -> Stop | None:
    margin = session.request.stop_margin
    if margin is None or expected.chance_of_more > 1 - SURE:
        return None
    sure = f"{100 * (1 - expected.chance_of_more):.0f} % sure that nothing untried is more than {100 * margin:g} % faster"
    return Stop(reason=StopReason.CONVERGED, message=sure)


def pending_layouts(session: Session, book: JobSnapshot) -> Sequence[TrialConfig]:
    """What the strategy has proposed and has no outcome yet."""
    opened = [trial for trial in book.open if trial.purpose is Purpose.SEARCH]
    return [trial.config for trial in session.without_environment_stage(opened)]
