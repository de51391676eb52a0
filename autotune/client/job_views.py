"""A job, how far it is, its trials, and what they print and come to."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from autotune.client.decoding import Plain
from autotune.client.point_views import Answer, Gain

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
"""States of a job of which nothing happens any more by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A tuning job as lists show it; `Client.job` has its whole request."""

    id: str
    state: str
    """QUEUED, RUNNING, PAUSING, PAUSED, STOPPING, CANCELLING, SUCCEEDED, FAILED or CANCELLED."""
    reason: str
    """Why it ended, in a word; empty while it is open."""
    message: str
    model: str
    submitter: str
    """Who asked for it; empty: whoever uses the machine or the database itself."""
    priority: int
    """Higher ones go first."""
    created: datetime
    updated: datetime
    active_seconds: int
    """Seconds that workers have held it."""
    version: int
    """Grows with every change that has an event."""
    request: Plain
    """In lists: model, name, tags, note, space, strategy, cluster, ranks, runner, trials, max_seconds. Of a `Job`: all fields
    that were given, and the defaults of the others."""
    answer: Answer | None = None
    """What it has found so far; None: nothing that may win has been measured, or the service is older than this client."""

    @property
    def name(self) -> str:
        """What it is called; empty: it has no name beside its id."""
        return str(self.request.get("name") or "")

    @property
    def tags(self) -> tuple[str, ...]:
        """Words to find it by."""
        return tuple(self.request.get("tags") or ())

    @property
    def note(self) -> str:
        """What somebody wrote down about it."""
        return str(self.request.get("note") or "")

    @property
    def ended(self) -> bool:
        """Whether nothing happens to it any more by itself; one that failed or succeeded may be resumed."""
        return self.state in ENDED

    @property
    def etag(self) -> str:
        """What `If-Match` is sent with, so that a change is made to this version alone."""
        return f'"{self.version}-{self.active_seconds}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobSummary):
    """A tuning job with its whole request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Jobs, newest first."""

    items: tuple[JobSummary, ...]
    next: str | None
    """`cursor` of the next page; None: this is the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """How far a job is."""

    job: str
    version: int
    outcomes: Mapping[str, int]
    """Outcome -> trials."""
    searched: int
    """Search trials that started and have an outcome: the part of the budget that is spent."""
    running: int
    seconds_left: float | None
    """At most, at the job's own pace, controls and confirmations included; None: it does not go on, or no trial has ended."""
    best_rate: float | None
    """Samples/s of the answer so far; None: nothing that may win has been measured."""
    baseline_rate: float | None
    gain: Gain | None
    """The answer over the baseline; None: one of them was not measured."""
    keeps_baseline: bool
    """Whether the answer so far is to keep the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewList:
    """Jobs in the order in which they were asked for."""

    items: tuple[Overview, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One measurement that a job wants or has."""

    number: int
    """0, 1, 2, … in the order of proposal; 0 is the baseline."""
    purpose: str
    """search, screen, confirm or control."""
    fidelity: str
    repeat: int
    counted: bool
    """Whether it counts against the budget of trials."""
    outcome: str | None
    """OK, INFEASIBLE, INVALID, WRONG, FAILED, TIMEOUT, LOST, PREEMPTED, PRUNED or CANCELLED; None: wanted or running."""
    config: Plain
    """Knob -> value."""
    attempts: int
    created: datetime
    started: datetime | None
    """None: no attempt was started; with an outcome: it was refused before it cost a device."""
    finished: datetime | None
    result: Plain | None
    """What was measured (docs/measurement.md): `samples_per_second` with its interval, `peak_memory_bytes` of the highest
    rank, `step_seconds`, `message`, … Numbers that are not finite are None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPage:
    """Trials by number."""

    items: tuple[Trial, ...]
    next: int | None
    """`cursor` of the next page; None: there is none now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One execution of a trial."""

    trial: int
    number: int
    """1, 2, … within the trial."""
    state: str
    """running, accepted, retried, superseded or abandoned."""
    outcome: str | None
    started: datetime
    finished: datetime | None
    result: Plain | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptList:
    """The attempts of a trial, oldest first."""

    items: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a job."""

    sequence: int
    """1, 2, 3, … within the job, without a gap."""
    time: datetime
    kind: str
    """job_created, job_acquired, job_released, job_asked, job_changed, trial_added, trial_refused, attempt_started,
    attempt_finished, attempt_abandoned, reference_set, or another one."""
    payload: Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Events in order."""

    items: tuple[Event, ...]
    next: int
    """`after` of the next page, which may be empty still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the ranks of a running attempt did when they were heard last."""

    trial: int
    attempt: int
    """1, 2, … within the trial."""
    phase: str
    step: int
    samples_per_second: float | None
    message: str
    time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressList:
    """The running attempts of a job, by trial."""

    items: tuple[Progress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A part of what a rank of a trial printed. It may begin and end within a line."""

    sequence: int
    """Grows over all attempts of the trial; it jumps where parts were left out."""
    attempt: int
    """1, 2, … within the trial."""
    rank: int
    time: datetime
    """When it was written down."""
    start: int
    """Bytes that the attempt had printed before it, on all ranks, what was left out included."""
    size: int
    """Its own bytes, as UTF-8."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Parts in order."""

    items: tuple[LogPart, ...]
    next: int
    """`after` of the next page, which may be empty still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The best configuration as a framework's file."""

    text: str
    """The file's content."""
    note: str
    """What the format cannot say; empty: nothing."""
