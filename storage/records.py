"""Rows as values: what the Store gives out."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from search_spaces.cluster import ClusterSpec
from search_spaces.microbenchmark import Measured
from search_spaces.outcome import JobState, Outcome, Purpose, StopReason
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.service_records import Actor


class AttemptState(StrEnum):
    """What became of an attempt. The values are stored: never rename one."""

    RUNNING = "running"
    """The trial's current attempt: its result will be accepted."""
    ACCEPTED = "accepted"
    """Its result is the trial's."""
    RETRIED = "retried"
    """Its outcome gets another attempt: the trial is wanted again."""
    SUPERSEDED = "superseded"
    """Its result came after the attempt was given up: kept, never counted."""
    ABANDONED = "abandoned"
    """Given up without a result, because its process died or let the job go."""


class EventKind(StrEnum):
    """The events that the store writes itself; callers of `Store.add_event` add kinds of their own."""

    JOB_CREATED = "job_created"
    JOB_ACQUIRED = "job_acquired"
    """A process holds the job from here on; the payload names it."""
    JOB_RELEASED = "job_released"
    """The payload has the state, the reason and the message that the job was left with."""
    JOB_ASKED = "job_asked"
    """A person asked for a change; the payload has the state that followed at once."""
    JOB_CHANGED = "job_changed"
    """The payload has the fields of the request that have other values now."""
    TRIAL_ADDED = "trial_added"
    TRIAL_REFUSED = "trial_refused"
    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_FINISHED = "attempt_finished"
    """The payload has the attempt's state and outcome."""
    ATTEMPT_ABANDONED = "attempt_abandoned"
    REFERENCE_SET = "reference_set"
    NODE_QUARANTINED = "node_quarantined"
    """The payload has the node, the reason and until when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that may hold a job: enough to tell whether it still lives. `storage.owners.current_owner` makes one."""

    host: str
    pid: int
    started: float
    """When the process started, in seconds since its host booted: tells a reused pid, and clock changes leave it as it is.
    0 where the system does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write a job, until it expires or is released. Every write is fenced by its token."""

    job_id: str
    token: int
    owner: Owner
    expires: datetime
    state: JobState
    """The job's state when the lease was given or extended last: PAUSING, STOPPING and CANCELLING are to be obeyed."""


class Ask(StrEnum):
    """What a person may ask of a job."""

    PAUSE = "pause"
    """Let running trials end, and go on later."""
    RESUME = "resume"
    """Go on: the job waits for a worker."""
    STOP = "stop"
    """Let running trials end, and be content with the best so far."""
    CANCEL = "cancel"
    """Kill running trials, and end."""


HELD = (JobState.RUNNING, JobState.PAUSING, JobState.STOPPING, JobState.CANCELLING)
"""States of a job that a process holds, or held when it died."""
OVER = (JobState.SUCCEEDED, JobState.CANCELLED)
"""States of a job that does not go on by itself, or by being resumed alone: SUCCEEDED needs a larger budget."""
ENDED = (*OVER, JobState.FAILED)
"""States in which nothing happens to a job unless a person wants it."""

ORIGIN = "origin"
"""Key of a job's stored request: what the job came by, where that was not by who writes the database: `service` or `file`."""
LATEST = "latest"
"""Names the job that was created last wherever a job's id may be given. Ids begin with a digit."""
BUDGET = ("trials", "max_seconds")
"""Fields of a request that may change until the job has ended, and that are raised to go on with one that SUCCEEDED."""
LABELS = ("name", "tags", "note")
"""Fields of a request that describe the job to people. They may change in every state."""

DAMAGED = "$damaged"
"""Key of what stands in place of a JSON value that cannot be read: the text that was found."""
LISTED = ("model", *LABELS, "space", "strategy", "cluster", "ranks", "runner", "trials", "max_seconds")
"""Fields of a request that lists show, and search for."""


def summary_of(request: Any) -> dict[str, Any]:
    """What lists show of a request. A field that is no text, number or list of words is left out: its size has no bound.

    Of a damaged request, which may be anything, that it is damaged.
    """
    if not isinstance(request, Mapping) or DAMAGED in request:
        return {DAMAGED: ""}
    found = {name: request[name] for name in LISTED if name in request}
    return {name: value for name, value in found.items() if not isinstance(value, dict)}


ASKED: Mapping[JobState, tuple[JobState, str, str]] = {
    JobState.PAUSING: (JobState.PAUSED, "paused", "paused on request"),
    JobState.STOPPING: (JobState.SUCCEEDED, StopReason.STOPPED, "stopped on request"),
    JobState.CANCELLING: (JobState.CANCELLED, "cancelled", "cancelled on request"),
}
"""What a running job was asked for -> state, reason and message that it is left with when nothing of it runs any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """How a job comes to the queue of the workers."""

    submitter: str = ""
    """Who asks for it."""
    priority: int = 0
    """Higher ones go first."""
    devices: int = 1
    """Devices that it takes while it runs: what its seconds are multiplied with in its submitter's usage."""
    key: str | None = None
    """The client's own name of this submission: sent twice with the same body, it is one job."""
    body_hash: str = ""
    """What tells bodies apart; goes with `key`."""
    by: Actor | None = None
    """Who submits, for the audit log and the quotas; None: whoever the store acts for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Which jobs of the queue a worker takes."""

    running_jobs: int | None = None
    """Jobs of a submitter that may run at a time; None: no limit."""
    device_seconds: float | None = None
    """Seconds times devices after which no further job of a submitter starts on that day (UTC); None: no limit."""
    runners: frozenset[str] = frozenset()
    """The runners whose jobs it takes; empty: all."""
    devices: frozenset[str] = frozenset()
    """The kinds of device whose jobs it takes, cpu or cuda; empty: all."""


class Scope(StrEnum):
    """What a key allows. The values are stored: never rename one."""

    READ = "read"
    """See one's own jobs."""
    SUBMIT = "submit"
    """Open and steer one's own jobs, and have webhooks."""
    OPERATE = "operate"
    """See and steer everybody's jobs, and see what owners use. It includes READ."""
    ADMIN = "admin"
    """Everything: also webhooks of others, and the audit log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key without its secret."""

    id: str
    owner: str
    scopes: frozenset[str]
    created: datetime
    expires: datetime | None
    revoked: datetime | None
    last_used: datetime | None


PROVENANCE = "provenance"
"""Key of a calibration's environment: how it came about, where that is not by `autotune calibrate`."""
QUICK = "quick"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """What a micro-benchmark measured on a cluster."""

    id: str
    created: datetime
    fingerprint: str
    """Of the cluster's hardware."""
    cluster: ClusterSpec
    environment: Mapping[str, str]
    """Versions and hardware as rank 0 saw them."""
    hosts: tuple[str, ...]
    """The host of each rank."""
    seconds: float
    """What the measurement took, start of the ranks included."""
    context_bytes: int | None
    """See `MicrobenchmarkResult`; so `workspace_bytes`."""
    workspace_bytes: int | None
    rows: tuple[Measured, ...]

    @property
    def quick(self) -> bool:
        """Whether it was measured unasked, in a second or two: `autotune calibrate` measures in full all the same."""
        return self.environment.get(PROVENANCE) == QUICK


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRecord:
    """A node that no job places ranks on for a while."""

    node: str
    """Its name, as the runner tells it."""
    reason: str
    job_id: str
    """The job that found it out; it may be gone."""
    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long things took."""

    count: int
    seconds: float
    """In all."""
    within: Mapping[float, int]
    """Seconds -> how many took no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Counts over all jobs."""

    jobs: Mapping[str, int]
    """State -> jobs in it."""
    trials: Mapping[str, int]
    """Outcome -> trials that ended so."""
    longest_wait: float
    """Seconds that the oldest job of the queue has waited."""
    durations: Mapping[str, "Durations"]
    """Outcome -> how long the trials took that ended so; refused ones took no time, and are left out."""
    best: Mapping[str, "BestRate"]
    """Running job -> what it has found so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRate:
    """What a running job has found so far."""

    submitter: str
    """Whose job it is."""
    samples_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A tuning job."""

    id: str
    created: datetime
    updated: datetime
    state: JobState
    reason: str
    """A StopReason for SUCCEEDED, else a short word; empty while open."""
    message: str
    request: Mapping[str, Any]
    """The job request as plain data (`autotune.request`)."""
    reference_losses: tuple[float, ...]
    """Losses of the first steps that every trial is held against; empty until the first OK trial."""
    active_seconds: float
    """Seconds that processes have held the job, over all of them: what a budget in seconds is counted in."""
    owner: Owner | None
    """The process that holds it."""
    submitter: str = ""
    """Who asked for it; empty: whoever uses the database directly."""
    priority: int = 0
    queued: datetime | None = None
    """Since when it waits for a worker, or may be taken over by one; None: workers leave it alone."""
    version: int = 0
    """Grows with every change that has an event."""
    devices: int = 1
    """Devices that it takes while it runs."""
    events_removed: int = 0
    """Events up to this sequence were removed because they were old."""
    answer: Mapping[str, Any] | None = None
    """What the job has found so far (`autotune.outcome.verdict.answer_document`, without its standings); None: nothing yet."""
    damage: str = ""
    """What of its row cannot be read; request, reference losses and answer are empty then. Empty: nothing."""


FULL = "full"
"""The fidelity of a trial whose every figure is measured."""
FEWER = "fewer_micro_batches"
"""The fidelity of a trial whose step time is extrapolated from steps of fewer micro-batches."""
SHALLOWER = "fewer_layers"
"""The fidelity of a trial whose time and memory are extrapolated from models of fewer layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One measurement wanted by a job; unique by (job, config, purpose, fidelity, repeat)."""

    job_id: str
    number: int
    """0, 1, 2, … in the order of proposal; 0 is the baseline."""
    config: TrialConfig
    config_hash: str
    """The configuration's hash, kept because it costs more than all else that is asked of a record."""
    purpose: Purpose
    fidelity: str
    """FULL, FEWER or SHALLOWER."""
    repeat: int
    counted: bool
    """Whether it counts against the budget of trials."""
    outcome: Outcome | None
    """None: wanted or running."""
    result: TrialResult | None
    """The accepted attempt's result; None while there is none. A refused candidate has a result and no attempt."""
    attempts: int
    """Attempts started so far."""
    created: datetime
    started: datetime | None
    """Start of the accepted attempt."""
    finished: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One execution of a trial."""

    token: str
    job_id: str
    trial_number: int
    number: int
    """1, 2, … within the trial."""
    state: AttemptState
    outcome: Outcome | None
    started: datetime
    finished: datetime | None
    """When its result came; None while it runs, and where none ever came."""
    host: str
    """Host of the process that holds the job, not of the ranks."""
    result: TrialResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """How far a job is."""

    outcomes: Mapping[str, int]
    """Outcome -> trials."""
    searched: int
    """Search trials that started and have an outcome."""
    running: int
    controls: int
    """The baseline measured again between search trials, with an outcome."""
    confirmations: int
    """Finalists measured again, with an outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Since when and where an attempt runs, or ran."""

    started: datetime
    node: str | None
    """Of its first rank, or of the rank that failed first; the host where nodes have no names. None: not told (yet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """Something that happened to a job, written in the same transaction as the change that it tells."""

    job_id: str
    sequence: int
    """1, 2, 3, … within the job, with no gap."""
    time: datetime
    kind: str
    payload: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNews:
    """How a job stands, and its events beyond those that are known."""

    state: JobState
    version: int
    """The sequence of its last event."""
    events: tuple[EventRecord, ...]
