"""Early stopping of a search: spent seconds or device-hours, or too little expected gain from further trials."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.loop.environment_stage import reserved_seconds
from autotune.loop.results import kind_of_failure
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.session.session import Session
from autotune.strategies.strategy import Outlook
from search_spaces.outcome import Outcome, Purpose, StopReason
from search_spaces.trial_config import TrialConfig

FINALISTS = 3
"""Trials of one confirmation round: winner, runner-up and baseline."""
SURE = 0.95
"""Required probability that no untried configuration is faster by more than the margin."""
ALIKE = 3
"""If the first trials, this many with the baseline, all fail with the same error, no configuration is expected to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonCause:
    """The common cause of failure of every trial so far."""

    name: str | None
    """Name of its row in the failure table; None: the table has none."""
    message: str
    """The first trial's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why the search is over."""

    reason: StopReason
    message: str
    """The reason in words, without the number of trials."""


def stop_of(session: Session, snapshot: JobSnapshot) -> Stop | None:
    """Return why the search stops before its trials are spent; None: it continues.

    0. The baseline and the trials after it failed with the same cause, which is independent of the configuration.
    1. The request only asks for a configuration that runs, and there is one.
    2. The request's seconds or device-hours are spent, except for the last stage and one confirmation round.
    3. `run_device_hours`: in a run of this length, the next trial is expected to save less than it costs.
    4. `stop_margin`: it is 95 % sure that no untried configuration is faster by more than this.

    The last two use the strategy's predictions, if it has any. Like its proposals, they depend only on the rows.
    """
    request = session.request
    ended = [trial for trial in snapshot.searched if trial.outcome is not None]
    if len(ended) >= ALIKE and common_cause(snapshot) is not None:
        return Stop(reason=StopReason.EXHAUSTED, message=f"the first {ALIKE} trials failed alike")
    if request.stop_at_first and session.ranking.ranked(snapshot.searched):
        return Stop(reason=StopReason.FOUND, message="a configuration runs")
    if (out_of_time := time_is_up(session, snapshot, reserved_seconds(session, snapshot))) is not None:
        return out_of_time
    if request.run_device_hours is None and request.stop_margin is None:
        return None
    expected = outlook_of(session, snapshot)
    return None if expected is None else _not_worth_it(session, expected) or _sure(session, expected)


def time_is_up(session: Session, snapshot: JobSnapshot, reserved: float = 0.0) -> Stop | None:
    """Return the time budget that is spent, after `reserved` seconds and one confirmation round; None: none is."""
    request = session.request
    spent = snapshot.job.active_seconds
    reserve = reserved
    if request.confirm_repeats:  # the round has as many trials as there are to confirm
        reserve += min(FINALISTS, len(session.ranking.ranked(snapshot.searched))) * snapshot.mean_seconds
    seconds = spent + reserve
    if request.max_seconds is not None and seconds >= request.max_seconds:
        why = f": {spent:.0f} s, and {reserve:.0f} s are kept to measure the best again" if spent < request.max_seconds else ""
        return Stop(reason=StopReason.BUDGET, message=f"{request.max_seconds:g} s are spent{why}")
    if request.device_hours is not None and session.device_hours(seconds) >= request.device_hours:
        return Stop(reason=StopReason.BUDGET, message=f"{request.device_hours:g} device-hours are spent")
    return None


def common_cause(snapshot: JobSnapshot) -> CommonCause | None:
    """The first trial's cause if all failures are of the same kind; None: they differ, or a trial ran or did not fit."""
    ended = [trial for trial in snapshot.searched if trial.outcome is not None]
    # INFEASIBLE does not stop a job: other configurations may fit.
    breaking = (Outcome.FAILED, Outcome.TIMEOUT, Outcome.LOST)
    results = [trial.result for trial in ended if trial.outcome in breaking and trial.result is not None]
    if not results or len(results) < len(ended):
        return None
    alike = len({kind_of_failure(result) for result in results}) == 1
    first = results[0]
    return CommonCause(name=first.cause, message=first.message) if alike and first.message else None


def outlook_of(session: Session, snapshot: JobSnapshot) -> Outlook | None:
    """The strategy's expectation of further trials; None: it does not predict, or nothing was measured."""
    margin = session.request.stop_margin or 0.0
    return session.strategy.outlook(
        session.space, session.without_environment_stage(snapshot.searched), pending_layouts(session, snapshot), margin
    )


def _not_worth_it(session: Session, expected: Outlook) -> Stop | None:
    hours = session.request.run_device_hours
    if hours is None:
        return None
    saved = hours * expected.expected_gain / (1 + expected.expected_gain)
    cost = session.device_hours(expected.trial_seconds)
    if saved >= cost:
        return None
    message = f"the next trial costs {cost:.2g} device-hours and is expected to save {saved:.2g} of {hours:g}"
    return Stop(reason=StopReason.CONVERGED, message=message)


def _sure(session: Session, expected: Outlook) -> Stop | None:
    margin = session.request.stop_margin
    if margin is None or expected.chance_of_more > 1 - SURE:
        return None
    message = f"{100 * (1 - expected.chance_of_more):.0f} % sure that nothing untried is more than {100 * margin:g} % faster"
    return Stop(reason=StopReason.CONVERGED, message=message)


def pending_layouts(session: Session, snapshot: JobSnapshot) -> Sequence[TrialConfig]:
    """The strategy's proposals that have no outcome yet."""
    opened = [trial for trial in snapshot.open if trial.purpose is Purpose.SEARCH]
    return [trial.config for trial in session.without_environment_stage(opened)]
