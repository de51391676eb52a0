"""Rows as values, as returned by the Store."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MeasuredRow
from search_spaces.outcome import JobState, Outcome, Purpose, StopReason
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.service_records import Actor


class AttemptState(StrEnum):
    """State of an attempt. The values are stored: never rename one."""

    RUNNING = "running"
    """The trial's current attempt: its result will be accepted."""
    ACCEPTED = "accepted"
    """Its result is the trial's."""
    RETRIED = "retried"
    """The trial is retried after its outcome."""
    SUPERSEDED = "superseded"
    """Its result came after the attempt was abandoned: stored, never counted."""
    ABANDONED = "abandoned"
    """Without a result, because its process died or released the job."""


class EventKind(StrEnum):
    """The events that the store writes itself; callers of `EventStore.add` add other kinds."""

    JOB_CREATED = "job_created"
    JOB_ACQUIRED = "job_acquired"
    """A process has acquired the job; the payload names it."""
    JOB_RELEASED = "job_released"
    """The payload has the job's state, reason and message after the release."""
    JOB_ASKED = "job_asked"
    """A user requested a change; the payload has the state that followed immediately."""
    JOB_CHANGED = "job_changed"
    """The payload has the changed fields of the request."""
    TRIAL_ADDED = "trial_added"
    TRIAL_REFUSED = "trial_refused"
    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_FINISHED = "attempt_finished"
    """The payload has the attempt's state and outcome."""
    ATTEMPT_ABANDONED = "attempt_abandoned"
    REFERENCE_SET = "reference_set"
    NODE_QUARANTINED = "node_quarantined"
    """The payload has the node, the reason and the end time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that may hold a job, with what is needed to check whether it is alive. See `storage.leases.current_owner`."""

    host: str
    pid: int
    started: float
    """Start time of the process in seconds since its host booted: detects a reused pid, and is immune to clock changes.
    0 if the system does not provide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to write a job until the lease expires or is released. Its token fences every write."""

    job_id: str
    token: int
    owner: Owner
    expires: datetime
    state: JobState
    """The job's state when the lease was granted or last extended: the holder must obey PAUSING, STOPPING and CANCELLING."""


class Ask(StrEnum):
    """A user's request to change a job's state."""

    PAUSE = "pause"
    """Let running trials end; the job can be resumed later."""
    RESUME = "resume"
    """Continue: the job waits for a worker."""
    STOP = "stop"
    """Let running trials end, and succeed with the best so far."""
    CANCEL = "cancel"
    """Kill running trials, and end the job."""


HELD = (JobState.RUNNING, JobState.PAUSING, JobState.STOPPING, JobState.CANCELLING)
"""States of a job that a process holds, or held when it died."""
OVER = (JobState.SUCCEEDED, JobState.CANCELLED)
"""States of a job that a resume does not continue: CANCELLED never continues, SUCCEEDED needs a larger budget."""
ENDED = (*OVER, JobState.FAILED)
"""States that only change by a user's request."""

ORIGIN = "origin"
"""Key of a job's stored request: `service` or `file`, if the job was not written directly into the database."""
LATEST = "latest"
"""Names the newest job wherever a job id is accepted. Ids begin with a digit."""
BUDGET = ("trials", "max_seconds")
"""Fields of a request that may change until the job has ended. Raise them to continue a job that SUCCEEDED."""
LABELS = ("name", "tags", "note", "team")
"""Fields of a request that describe the job to users. They may change in every state."""

DAMAGED = "$damaged"
"""Key of an object that replaces a JSON value that cannot be read; its value is the stored text."""
SEARCHED = ("model", *LABELS, "space", "strategy", "cluster", "runner")
"""Fields of a request that `JobFilter.text` looks at."""
SHAPE = (
    "num_layers", "hidden_size", "ffn_hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "num_experts",
    "experts_per_token",
)  # fmt: skip
"""Fields of a request's model that tell apart models of one name."""


def summary_of(request: Any) -> dict[str, Any]:
    """Return the fields of a request that lists show. Objects are left out, because their size is unbounded.

    For a damaged request, which may be anything, the summary only states the damage.
    """
    if not isinstance(request, Mapping) or DAMAGED in request:
        return {DAMAGED: ""}
    # Fields of a request that lists show.
    summary = {name: request[name] for name in (*SEARCHED, "ranks", "trials", "max_seconds") if name in request}
    return {name: value for name, value in summary.items() if not isinstance(value, dict)}


@dataclass(frozen=True, slots=True)
class Audience:
    """Someone who sees their own jobs and those of their teams."""

    owner: str
    teams: frozenset[str]

    def includes(self, job: "JobRecord") -> bool:
        """Whether they may see the job."""
        return job.submitter == self.owner or job.request.get("team") in self.teams


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """The jobs that a list has: those for which every field holds."""

    states: Collection[JobState] = ()
    """It is in one of these states; empty: in any."""
    submitter: str | None = None
    """It is theirs; None: anybody's."""
    audience: Audience | None = None
    """They may see it; None: anybody."""
    tags: Collection[str] = ()
    """It has all of these."""
    text: str = ""
    """Words, all of which are part of its id, state, message, submitter or one of the `SEARCHED` fields of its request, in
    upper or lower case (SQLite knows the case of ASCII letters alone)."""


ANY_JOB = JobFilter()
ASKED: Mapping[JobState, tuple[JobState, str, str]] = {
    JobState.PAUSING: (JobState.PAUSED, "paused", "paused on request"),
    JobState.STOPPING: (JobState.SUCCEEDED, StopReason.STOPPED, "stopped on request"),
    JobState.CANCELLING: (JobState.CANCELLED, "cancelled", "cancelled on request"),
}
"""Requested state of a running job -> its state, reason and message when nothing of it is running any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """How a job enters the queue of the workers."""

    submitter: str = ""
    """The owner of the job."""
    priority: int = 0
    """Higher priorities run first."""
    devices: int = 1
    """Devices that it uses while it runs: its submitter's usage is its seconds times this number."""
    key: str | None = None
    """Idempotency key of the client: sent twice with the same body, it creates one job."""
    body_hash: str = ""
    """Hash of the body, to compare bodies; used with `key`."""
    by: Actor | None = None
    """The actor, for the audit log and the quotas; None: the actor of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Which jobs of the queue a worker takes."""

    running_jobs: int | None = None
    """Jobs of a submitter that may run at the same time; None: no limit."""
    device_seconds: float | None = None
    """Device-seconds after which no further job of a submitter starts on that day (UTC); None: no limit."""
    runners: frozenset[str] = frozenset()
    """Take only jobs for these runners; empty: all."""
    devices: frozenset[str] = frozenset()
    """Take only jobs for these kinds of device, cpu or cuda; empty: all."""
    local_devices: frozenset[str] = frozenset()
    """As `devices`, but only of jobs without a Ray cluster of their own: these run on the worker's machine."""


class Scope(StrEnum):
    """The permissions of a key. The values are stored: never rename one."""

    READ = "read"
    """Read the owner's jobs."""
    OBSERVE = "observe"
    """Read all jobs. It includes READ."""
    SUBMIT = "submit"
    """Create and control the owner's jobs and webhooks."""
    OPERATE = "operate"
    """Read and control all jobs, and read the usage of owners. It includes OBSERVE."""
    ADMIN = "admin"
    """Everything, including all webhooks and the audit log."""


TEAM = "team:"
"""Beginning of a key's scope that names a team."""
JOB = "job:"
"""Beginning of a key's scope that names the only job that it shows: the key is part of a link to it."""


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

    @property
    def teams(self) -> frozenset[str]:
        """The teams whose jobs its owner sees: scopes such as `team:vision`."""
        return frozenset(scope.removeprefix(TEAM) for scope in self.scopes if scope.startswith(TEAM))

    @property
    def job(self) -> str:
        """The only job that it shows, as part of a link; empty: it is no link."""
        return next((scope.removeprefix(JOB) for scope in self.scopes if scope.startswith(JOB)), "")


PROVENANCE = "provenance"
"""Key of a calibration's environment: its origin, if that is not `autotune calibrate`."""
QUICK = "quick"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """The result of a micro-benchmark on a cluster."""

    id: str
    created: datetime
    fingerprint: str
    """Fingerprint of the cluster's hardware."""
    cluster: ClusterSpec
    environment: Mapping[str, str]
    """Versions and hardware as rank 0 saw them."""
    hosts: tuple[str, ...]
    """The host of each rank."""
    seconds: float
    """Duration of the measurement, including the start of the ranks."""
    context_bytes: int | None
    """See `MicrobenchmarkResult`, also for `workspace_bytes`."""
    workspace_bytes: int | None
    rows: tuple[MeasuredRow, ...]

    @property
    def quick(self) -> bool:
        """Whether it is an automatic calibration of a second or two. It does not replace `autotune calibrate`."""
        return self.environment.get(PROVENANCE) == QUICK


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRecord:
    """A node on which no job places ranks until the quarantine ends."""

    node: str
    """Its name, as reported by the runner."""
    reason: str
    job_id: str
    """The job that quarantined it; the job may have been deleted."""
    since: datetime
    until: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationHistogram:
    """A histogram of durations."""

    count: int
    seconds: float
    """Sum of all durations."""
    within: Mapping[float, int]
    """Seconds -> number of durations up to that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Counts over all jobs."""

    jobs: Mapping[str, int]
    """State -> number of jobs in this state."""
    trials: Mapping[str, int]
    """Outcome -> number of trials with this outcome."""
    longest_wait: float
    """Seconds that the oldest job in the queue has waited."""
    durations: Mapping[str, "DurationHistogram"]
    """Outcome -> durations of the trials with this outcome, without refused ones, which did not run."""
    best: Mapping[str, "BestRate"]
    """Running job -> its best rate so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRate:
    """The best rate of a running job so far."""

    submitter: str
    """The owner of the job."""
    samples_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredJob:
    """A job with an answer, and what makes its rate comparable."""

    job: "JobRecord"
    global_batch_size: int | None
    sequence_length: int | None
    shape: tuple[str | None, ...]
    """The values of `SHAPE`; None: the model has no such field, as one with a factory."""


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
    reference_losses: Mapping[str, tuple[float, ...]]
    """Name of a reference (`search_spaces.trial.reference_name`) -> losses of the first steps, which every trial with it is
    compared with; empty until the first OK trial."""
    active_seconds: float
    """Total seconds that processes have held the job. A budget in seconds limits this time."""
    owner: Owner | None
    """The process that holds it."""
    submitter: str = ""
    """The owner of the job; empty: a direct user of the database."""
    priority: int = 0
    queued: datetime | None = None
    """When it was queued for workers, which may take it, or take it over; None: workers ignore it."""
    version: int = 0
    """Increases with every change that has an event."""
    devices: int = 1
    """Devices that it uses while it runs."""
    events_removed: int = 0
    """Events up to this sequence were removed because they were old."""
    answer: Mapping[str, Any] | None = None
    """The job's answer so far (`autotune.outcome.verdict.answer_document`, without its standings); None: nothing yet."""
    damage: str = ""
    """The damaged part of its row; then request, reference losses and answer are empty. Empty: no damage."""


FULL = "full"
"""The fidelity of a trial that is measured in full."""
FEWER = "fewer_micro_batches"
"""The fidelity of a trial whose step time is extrapolated from steps of fewer micro-batches."""
SHALLOWER = "fewer_layers"
"""The fidelity of a trial whose time and memory are extrapolated from models with fewer layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One measurement of a job; unique by (job, config, purpose, fidelity, repeat)."""

    job_id: str
    number: int
    """0, 1, 2, … in the order of proposal; 0 is the baseline."""
    config: TrialConfig
    config_hash: str
    """The configuration's hash, stored because computing it would dominate the cost of a record."""
    purpose: Purpose
    fidelity: str
    """FULL, FEWER or SHALLOWER."""
    repeat: int
    counted: bool
    """Whether it counts against the budget of trials."""
    outcome: Outcome | None
    """None: planned or running."""
    result: TrialResult | None
    """The accepted attempt's result; None: not yet. A refused candidate has a result and no attempt."""
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
    """When its result came; None: it is running, or no result came."""
    host: str
    """Host of the process that holds the job, not of the ranks."""
    result: TrialResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCounts:
    """The progress of a job."""

    outcomes: Mapping[str, int]
    """Outcome -> number of trials."""
    searched: int
    """Search trials that started and have an outcome."""
    running: int
    controls: int
    """Control trials (repeats of the baseline between search trials) with an outcome."""
    confirmations: int
    """Confirmations of finalists with an outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlacement:
    """Start time and node of an attempt."""

    started: datetime
    node: str | None
    """Node of its first rank, or of the rank that failed first; the host if nodes have no names. None: unknown (yet)."""
