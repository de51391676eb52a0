"""The cost of a job, before it begins and while it runs: measurements and seconds, including controls and confirmations."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from autotune.loop.stopping import FINALISTS
from autotune.request.request import JobRequest
from autotune.strategies.guided.strategy import REBUILD_SECONDS, trial_seconds
from search_spaces.outcome import Purpose
from search_spaces.trial import Fidelity
from storage.records import ENDED, JobRecord, TrialRecord

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
