"""What a job costs, before it begins and while it runs: measurements and seconds, controls and confirmations included."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from autotune.loop.stopping import FINALISTS
from autotune.request.request import JobRequest
from autotune.strategies.guided.trial_cost import REBUILD_SECONDS, trial_seconds
from search_spaces.outcome import Purpose
from search_spaces.trial import Fidelity
from storage.records import ENDED, JobRecord, TrialRecord

START_SECONDS = 2.5
"""Until the processes of ranks compute: before the first trial, and before the confirmations, which have fresh ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """How many trials of each purpose."""

    search: int = 0
    control: int = 0
    confirm: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.search + self.control + self.confirm


def most_measurements(trials: int, control_every: int, confirm_repeats: int) -> Measurements:
    """What a job of this budget measures at most: a confirmation ends earlier where the winner is clear earlier."""
    controls = trials // control_every if control_every else 0
    return Measurements(search=trials, control=controls, confirm=FINALISTS * confirm_repeats)


def most_of_job(job: JobRecord) -> Measurements:
    """The same by a job's row."""
    defaults = {field.name: field.default for field in fields(JobRequest)}
    given = (job.request.get(name, defaults[name]) for name in ("trials", "control_every", "confirm_repeats"))
    return most_measurements(*given)


def job_seconds_left(job: JobRecord, done: Measurements) -> float | None:
    """Seconds until a job that goes on ends, at most; None: it does not go on, or no trial has ended."""
    if job.state in ENDED:
        return None
    budget = job.request.get("max_seconds")
    allowed = None if budget is None else budget - job.active_seconds
    return seconds_left(most_of_job(job), done, job.active_seconds, allowed=allowed)


def ended(trials: Iterable[TrialRecord]) -> Measurements:
    """What of it has an outcome; search trials that were refused before they started cost nothing, and do not count."""
    count = dict.fromkeys(Purpose, 0)
    for trial in trials:
        if trial.outcome is not None and (trial.counted or trial.purpose is not Purpose.SEARCH):
            count[trial.purpose] += 1
    return Measurements(search=count[Purpose.SEARCH], control=count[Purpose.CONTROL], confirm=count[Purpose.CONFIRM])


def seconds_left(
    most: Measurements, done: Measurements, seconds: float, since: int = 0, allowed: float | None = None
) -> float | None:
    """Seconds until the job ends, at most, at its own pace; None: no trial has ended.

    Args:
        most: what the job measures at most.
        done: what has ended.
        seconds: what the last measurements took, all that lies between them included (starts of ranks, refused candidates).
        since: measurements that had ended before these seconds began.
        allowed: seconds in which search trials may still start; None: any.
    """
    timed = done.total - since
    if timed <= 0:
        return None
    pace = seconds / timed
    # A search that ended early leaves trials that nobody will run: its confirmations tell that it is over.
    left = 0 if done.confirm else max(most.search - done.search, 0) + max(most.control - done.control, 0)
    search = pace * left if allowed is None else min(pace * left, max(allowed, 0.0) + pace * (left > 0))
    return search + pace * max(most.confirm - done.confirm, 0)


def trial_seconds_band(step_seconds: float, fidelity: Fidelity) -> tuple[float, float]:
    """Seconds of a trial on warm ranks whose steps take so long: where they are steady, and where they are not.

    Steady ones are timed for the fewest steps. Noisy ones warm up for longest, and are timed until the time or the steps of a
    measurement are used up.
    """
    least = float(trial_seconds(np.array([step_seconds]), fidelity)[0])
    timed = min(fidelity.max_steps * step_seconds, max(fidelity.max_seconds, fidelity.min_steps * step_seconds))
    return least, max(least, REBUILD_SECONDS + (fidelity.max_warmup_steps + 2) * step_seconds + timed)


def job_seconds(request: JobRequest, world_size: int, trial: tuple[float, float]) -> tuple[float, float]:
    """Seconds of the whole job, from least to most, whose trials take from `trial[0]` to `trial[1]`: one after another.

    A budget of time ends the search, not its confirmation.
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
