"""The budget of a job: its cost before it begins and while it runs, and when its search stops early."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from autotune.loop.environment_stage import reserved_seconds
from autotune.loop.trials import kind_of_failure
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.request.request import JobRequest
from autotune.session.session import Session
from autotune.strategies.guided.strategy import REBUILD_SECONDS, trial_seconds
from autotune.strategies.strategy import Outlook
from search_spaces.outcome import Outcome, Purpose, StopReason
from search_spaces.trial import Fidelity
from search_spaces.trial_config import TrialConfig
from storage.records import ENDED, JobRecord, TrialRecord

FINALISTS = 3
"""Trials of one confirmation round: winner, runner-up and baseline."""
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
    if margin is None or expected.chance_of_more > 1 - 0.95:
        return None
    message = f"{100 * (1 - expected.chance_of_more):.0f} % sure that nothing untried is more than {100 * margin:g} % faster"
    return Stop(reason=StopReason.CONVERGED, message=message)


def pending_layouts(session: Session, snapshot: JobSnapshot) -> Sequence[TrialConfig]:
    """The strategy's proposals that have no outcome yet."""
    opened = [trial for trial in snapshot.open if trial.purpose is Purpose.SEARCH]
    return [trial.config for trial in session.without_environment_stage(opened)]


START_SECONDS = 2.5
"""Time to start the rank processes: before the first trial, and before the confirmations, which use new processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Number of trials by purpose."""

    search: int = 0
    control: int = 0
    confirm: int = 0

    @property
    def total(self) -> int:
        """The sum over all purposes."""
        return self.search + self.control + self.confirm


def most_measurements(trials: int, control_every: int, confirm_repeats: int) -> Measurements:
    """Return the most measurements that a job with this budget makes. The confirmation ends earlier if the winner is clear."""
    controls = trials // control_every if control_every else 0
    return Measurements(search=trials, control=controls, confirm=FINALISTS * confirm_repeats)


def job_seconds_left(job: JobRecord, done: Measurements) -> float | None:
    """Upper bound of the seconds until the job ends; None: it has ended, or no trial has."""
    if job.state in ENDED:
        return None
    budget = job.request.get("max_seconds")
    allowed = None if budget is None else budget - job.active_seconds
    defaults = {field.name: field.default for field in fields(JobRequest)}
    settings = (job.request.get(name, defaults[name]) for name in ("trials", "control_every", "confirm_repeats"))
    return seconds_left(most_measurements(*settings), done, job.active_seconds, allowed=allowed)


def ended(trials: Iterable[TrialRecord]) -> Measurements:
    """Count the trials with an outcome. Search trials that were refused before they started cost nothing and do not count."""
    count = dict.fromkeys(Purpose, 0)
    for trial in trials:
        if trial.outcome is not None and (trial.counted or trial.purpose is not Purpose.SEARCH):
            count[trial.purpose] += 1
    return Measurements(search=count[Purpose.SEARCH], control=count[Purpose.CONTROL], confirm=count[Purpose.CONFIRM])


def seconds_left(
    most: Measurements, done: Measurements, seconds: float, since: int = 0, allowed: float | None = None
) -> float | None:
    """Upper bound of the seconds until the job ends, at its own pace; None: no trial has ended.

    Args:
        most: the most measurements that the job makes.
        done: the measurements that have ended.
        seconds: duration of the last measurements, including the time between them (starts of ranks, refused candidates).
        since: number of measurements that had ended before `seconds` began.
        allowed: seconds in which search trials may still start; None: no limit.
    """
    timed = done.total - since
    if timed <= 0:
        return None
    pace = seconds / timed
    # A search that ends early leaves trials unused. Once there are confirmations, the search is over.
    remaining = 0 if done.confirm else max(most.search - done.search, 0) + max(most.control - done.control, 0)
    search = pace * remaining if allowed is None else min(pace * remaining, max(allowed, 0.0) + pace * (remaining > 0))
    return search + pace * max(most.confirm - done.confirm, 0)


def trial_seconds_band(step_seconds: float, fidelity: Fidelity) -> tuple[float, float]:
    """Return the seconds of a trial on warm ranks with this step time: with steady steps, and with noisy ones.

    Steady steps need the fewest timed steps. Noisy steps use the longest warm-up, and are timed until the measurement's time or
    step limit.
    """
    least = float(trial_seconds(np.array([step_seconds]), fidelity)[0])
    timed = min(fidelity.max_steps * step_seconds, max(fidelity.max_seconds, fidelity.min_steps * step_seconds))
    return least, max(least, REBUILD_SECONDS + (fidelity.max_warmup_steps + 2) * step_seconds + timed)


def job_seconds(request: JobRequest, world_size: int, trial: tuple[float, float]) -> tuple[float, float]:
    """Return the least and most seconds of a whole job whose sequential trials take from `trial[0]` to `trial[1]` seconds.

    A time budget ends the search, not its confirmation.
    """
    most = most_measurements(request.trials, request.control_every, request.confirm_repeats)
    hours = request.device_hours
    budgets = [request.max_seconds, None if hours is None else hours * 3600 / world_size]
    allowed = min((limit for limit in budgets if limit is not None), default=float("inf"))
    starts = 2 if most.confirm else 1
    low, high = (
        min((most.search + most.control) * seconds, allowed) + most.confirm * seconds + starts * START_SECONDS
        for seconds in trial
    )
    return low, high
