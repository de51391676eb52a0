"""What the service answers with, as values. Fields of a newer service that are not known here are left out."""

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Plain = Mapping[str, Any]

ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
"""States of a job of which nothing happens any more by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A tuning job."""

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
    """The fields that were given, and the defaults of the others."""

    @property
    def ended(self) -> bool:
        """Whether nothing happens to it any more by itself; a failed one may be resumed."""
        return self.state in ENDED

    @property
    def etag(self) -> str:
        """What `If-Match` is sent with, so that a change is made to this version alone."""
        return f'"{self.version}-{self.active_seconds}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Jobs, newest first."""

    items: tuple[Job, ...]
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
    best_rate: float | None
    """Highest samples/s of a search trial within the capacity, by itself."""
    baseline_rate: float | None


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
class Space:
    """What a search space holds."""

    space: str
    hash: str
    domains: Mapping[str, tuple[Any, ...]]
    raw: int
    """Points of the Cartesian product."""
    legal: int
    """Distinct legal configurations."""
    merged: int
    """Points that say the same as a legal one."""
    refused: Mapping[str, int]
    """Rule -> points that it refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A rule that refuses a configuration."""

    rule: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Whether a configuration is legal."""

    legal: bool
    config: Plain
    """In canonical form."""
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedInterval:
    """A mean, and between what the truth is nine times out of ten."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Between what the truth is nine times out of ten."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of the ranks at one place along the pipeline, in bytes."""

    pipeline_rank: int
    layers: int
    total: float
    by_tag: Mapping[str, float]
    """Sums to the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePoint:
    """A point of the schedule of the data."""

    length: int
    """Tokens of a sample."""
    kept: int
    """Of these, what layers but the first and the last see."""
    weight: float
    """Share of the run's steps that it stands for."""
    step_seconds: float
    peak_memory_bytes: float
    """Of the fullest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What is predicted of a configuration."""

    samples_per_second: PredictedInterval
    tokens_per_second: float
    step_seconds: float
    step_seconds_band: Band
    breakdown_seconds: Mapping[str, float]
    """compute, tensor, pipeline, data, optimizer, offload: they sum to `step_seconds`."""
    peak_memory_bytes: tuple[RankMemory, ...]
    """Every rank of the pipeline; of a plan the fullest alone."""
    peak_memory_band: PredictedInterval
    """Of the fullest rank."""
    host_memory_bytes: float
    """Of a node's main memory."""
    memory_limit_bytes: int
    fit_probability: float
    tflops_per_device: float
    mfu: float | None
    flops_convention: str
    schedule: tuple[SchedulePoint, ...]
    """Its first, a middle and its last point; empty: the data are not scheduled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A configuration with what is predicted of it."""

    model: str
    parameter_count: int
    cluster: str
    world_size: int
    engine: str
    global_batch_size: int
    sequence_length: int
    config: Plain
    """In canonical form."""
    predicted: Predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReason:
    """Why a knob has its value: what the others come to."""

    knob: str
    text: str
    alternatives: tuple[Plain, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One of the best configurations."""

    world_size: int
    nodes: int
    config: Plain
    predicted: Predicted
    cost_per_million_tokens: float | None
    reasons: tuple[PlanReason, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMax:
    """The largest that fits."""

    dimension: str
    """seq_len, micro_batch or model."""
    value: int
    """Tokens, samples or parameters."""
    next: int | None
    """The smallest that was found not to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """What a space holds at best."""

    model: str
    parameter_count: int
    cluster: str
    engine: str
    global_batch_size: int
    sequence_length: int
    space: str
    objective: str
    max: PlanMax | None
    configurations: int
    """That were predicted."""
    fitting: int
    bucket_settings: int
    world_sizes: tuple[int, ...]
    seconds: float
    plans: tuple[Plan, ...]
    """The best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of presets."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptions:
    """Descriptions as plain data."""

    items: tuple[Plain, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The best configuration as a framework's file."""

    text: str
    """The file's content."""
    note: str
    """What the format cannot say; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the jobs of a submitter take."""

    submitter: str
    day: str
    """YYYY-MM-DD, in UTC."""
    device_seconds: float
    """Seconds that workers held the jobs on that day, times the devices of each."""
    running_jobs: int
    queued_jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An address that is told of its owner's jobs when they end."""

    id: str
    owner: str
    url: str
    created: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWebhook(Webhook):
    """A webhook with its secret, which is shown this once."""

    secret: str = field(repr=False)
    """What deliveries are signed with, as https://www.standardwebhooks.com says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookList:
    """Webhooks, oldest first."""

    items: tuple[Webhook, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryTry:
    """One request to a receiver."""

    time: datetime
    seconds: float
    status: int | None
    """The receiver's answer; None: none came."""
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What a webhook was told, or is to be told, of one job's end."""

    id: str
    """The `webhook-id` of every try."""
    job: str
    created: datetime
    state: str
    """pending, delivered or given_up."""
    due: datetime | None
    """When it is tried next; None: it is not."""
    tries: tuple[DeliveryTry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryList:
    """Deliveries, newest first."""

    items: tuple[Delivery, ...]


def decode(kind: type[T], data: Any) -> T:
    """Return the dataclass `kind` from what JSON held.

    Raises:
        KeyError, TypeError, ValueError: a field is missing or of another type.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"is no object, where {kind.__name__} was expected")
    hints = _hints(kind)  # type: ignore[arg-type]
    return kind(**{item.name: _value(hints[item.name], data[item.name]) for item in dataclasses.fields(kind)})  # type: ignore[arg-type]


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(kind: Any, value: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _value(arguments[0], value)
    if origin is tuple:
        return tuple(_value(arguments[0], item) for item in value)
    if origin is Mapping:
        return {name: _value(arguments[1], item) for name, item in value.items()}
    if kind is datetime:
        return datetime.fromisoformat(value)
    if dataclasses.is_dataclass(kind):
        return decode(kind, value)  # type: ignore[arg-type]
    if kind is not Any and isinstance(kind, type) and not isinstance(value, kind):
        raise TypeError(f"{value!r:.100} is no {kind.__name__}")
    return value
