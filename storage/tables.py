"""The tables: jobs, trials, attempts, rank measurements, logs, events, calibrations, quarantine; and those of the service.

Keys are natural (job, trial number, …), so primary keys enforce uniqueness. Types are those that SQLite and PostgreSQL share.
"""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ColumnElement,
    DateTime,
    Dialect,
    Enum,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    case,
    select,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql.functions import FunctionElement

from search_spaces.outcome import JobState, Outcome, Purpose
from storage.records import AttemptState, summary_of
from storage.service_records import DeliveryState


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC. SQLite has no time zones: there it is stored without one, and read as UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse a time without a zone, which is ambiguous."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone; store times in UTC")
        moment = value.astimezone(UTC)
        return moment.replace(tzinfo=None) if dialect.name == "sqlite" else moment

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Return the moment in UTC, independent of the session's zone."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class JsonList(JSON):
    """A JSON array: the database does not distinguish it from an object."""


def _words(kind: type[StrEnum]) -> Enum:
    """A column for the values of `kind`, stored as text so that a new value needs no migration."""
    return Enum(kind, native_enum=False, length=16, values_callable=lambda members: [member.value for member in members])


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  read once by SQLAlchemy
        datetime: UtcDateTime,
        dict[str, Any]: JSON(none_as_null=True),
        list[Any]: JsonList(none_as_null=True),
        JobState: _words(JobState),
        Outcome: _words(Outcome),
        Purpose: _words(Purpose),
        AttemptState: _words(AttemptState),
        DeliveryState: _words(DeliveryState),
    }


def _summary(context: Any) -> dict[str, Any]:
    return summary_of(context.get_current_parameters()["request"])


def table_of(row: type[Base]) -> Table:
    """The table of a row class, for statements without mapped objects."""
    table = row.__table__
    assert isinstance(table, Table)
    return table


class _ValidJson(FunctionElement[bool]):
    """Whether a column's text is JSON."""

    type = Boolean()
    name = "valid_json"
    inherit_cache = True


@compiles(_ValidJson)
def _always(_element: _ValidJson, _compiler: Any, **_options: Any) -> str:
    return "true"  # the server refuses other text in such a column


@compiles(_ValidJson, "sqlite")
def _asked(element: _ValidJson, compiler: Any, **options: Any) -> str:
    return f"json_valid({compiler.process(element.clauses, **options)})"


def readable(column: Any) -> ColumnElement[Any]:
    """A JSON column for queries of its parts: NULL if its text is damaged, because an error would fail the whole query."""
    return case((_ValidJson(column), column))


def of_job(table: Table, job_id: str) -> ColumnElement[bool]:
    """The condition for rows of a table that belong to a job."""
    if table is table_of(RankRow):
        return table.c.attempt.in_(select(AttemptRow.token).where(AttemptRow.job_id == job_id))
    belongs: ColumnElement[bool] = (table.c.id if table is table_of(JobRow) else table.c.job_id) == job_id
    return belongs


class JobRow(Base):
    """A job, its lease, and the counters that number its trials and events."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "created", "id"),
        Index(None, "state"),
        Index(None, "submitter", "created"),
        # Covers everything that quotas count, so that the rows, which may have a megabyte each, are not read.
        Index("ix_jobs_submitter_state", "submitter", "state", "stored_bytes"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    created: Mapped[datetime]
    updated: Mapped[datetime]
    state: Mapped[JobState]
    reason: Mapped[str] = mapped_column(Text)
    message: Mapped[str] = mapped_column(Text)
    request: Mapped[dict[str, Any]]
    summary: Mapped[dict[str, Any]] = mapped_column(default=_summary, server_default="{}")
    """The fields of the request that lists show; the whole request may have a megabyte."""
    reference_losses: Mapped[dict[str, Any] | None]
    """Losses by the name of the reference; a list in rows of earlier versions (`references_of`)."""
    answer: Mapped[dict[str, Any] | None]
    """The job's answer so far, as its holder decided from the ended trials; None: nothing yet."""
    active_seconds: Mapped[float]
    trial_count: Mapped[int]
    event_count: Mapped[int]
    submitter: Mapped[str] = mapped_column(String(64), server_default="")
    """The owner of the job; empty: a direct user of the database."""
    priority: Mapped[int] = mapped_column(server_default="0")
    queued: Mapped[datetime | None]
    """When it was queued for workers; None: only a process that names it may take it."""
    devices: Mapped[int] = mapped_column(server_default="1")
    """Devices that it uses while it runs."""
    charged_seconds: Mapped[float] = mapped_column(server_default="0")
    """The part of `active_seconds` that is included in its submitter's usage."""
    events_removed: Mapped[int] = mapped_column(server_default="0")
    """Events up to this sequence were removed because they were old."""
    stored_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    """Bytes that its submitter controls: its request, changes of it, and the output of its ranks."""
    lease_token: Mapped[int] = mapped_column(BigInteger)
    """The fencing token: increases with every holder, and is never reset."""
    lease_host: Mapped[str | None] = mapped_column(Text)
    """None: the job has no holder, and the other lease columns are unused."""
    lease_pid: Mapped[int | None]
    lease_started: Mapped[float | None]
    lease_expires: Mapped[datetime | None]
    lease_seen: Mapped[datetime | None]
    """The holder's last write: `active_seconds` includes its time up to here."""


class TrialRow(Base):
    """A planned or finished measurement; the scalar columns repeat values of the accepted result, for queries."""

    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint("job_id", "config_hash", "purpose", "fidelity", "repeat"),
        Index(None, "job_id", "outcome"),
        Index(None, "config_hash"),
    )

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    config: Mapped[dict[str, Any]]
    config_hash: Mapped[str] = mapped_column(String(16))
    purpose: Mapped[Purpose]
    fidelity: Mapped[str] = mapped_column(String(64))
    repeat: Mapped[int]
    counted: Mapped[bool]
    outcome: Mapped[Outcome | None]
    samples_per_second_mean: Mapped[float | None]
    samples_per_second_low: Mapped[float | None]
    samples_per_second_high: Mapped[float | None]
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    refusal: Mapped[dict[str, Any] | None]
    """The result of a refused candidate; other results are stored in their attempt."""
    attempt_count: Mapped[int]
    created: Mapped[datetime]
    started: Mapped[datetime | None]
    finished: Mapped[datetime | None]


class AttemptRow(Base):
    """One execution of a trial, with its whole result."""

    __tablename__ = "attempts"
    __table_args__ = (
        ForeignKeyConstraint(["job_id", "trial_number"], ["trials.job_id", "trials.number"], ondelete="CASCADE"),
        UniqueConstraint("job_id", "trial_number", "number"),
        Index(None, "job_id", "state"),
    )

    token: Mapped[str] = mapped_column(String(32), primary_key=True)
    job_id: Mapped[str] = mapped_column(String(32))
    trial_number: Mapped[int]
    number: Mapped[int]
    state: Mapped[AttemptState]
    outcome: Mapped[Outcome | None]
    host: Mapped[str] = mapped_column(Text)
    started: Mapped[datetime]
    finished: Mapped[datetime | None]
    result: Mapped[dict[str, Any] | None]
    progress: Mapped[dict[str, Any] | None]
    """The last reported progress of its ranks."""
    progress_time: Mapped[datetime | None]


class RankRow(Base):
    """The measurements of one rank in an attempt."""

    __tablename__ = "rank_measurements"

    attempt: Mapped[str] = mapped_column(ForeignKey("attempts.token", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    host: Mapped[str] = mapped_column(Text)
    peak_memory_bytes: Mapped[int] = mapped_column(BigInteger)
    memory_by_tag: Mapped[dict[str, Any]]
    tag_peak_bytes: Mapped[dict[str, Any]]
    rss_peak_bytes: Mapped[int] = mapped_column(BigInteger)
    cpu_seconds_per_step: Mapped[float]
    collectives: Mapped[list[Any]]
    host_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    reserved_bytes: Mapped[int | None] = mapped_column(BigInteger)
    non_torch_bytes: Mapped[int | None] = mapped_column(BigInteger)
    allocation_retries: Mapped[int | None]
    throttled: Mapped[bool | None]
    sm_clock_mhz: Mapped[float | None]


class LogRow(Base):
    """A part of the output of a trial's ranks, in order of arrival, over all attempts."""

    __tablename__ = "trial_logs"
    __table_args__ = (ForeignKeyConstraint(["job_id", "trial_number"], ["trials.job_id", "trials.number"], ondelete="CASCADE"),)

    job_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    trial_number: Mapped[int] = mapped_column(primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    attempt: Mapped[int]
    rank: Mapped[int]
    time: Mapped[datetime]
    start: Mapped[int] = mapped_column(BigInteger)
    """Bytes of the attempt's output before it, including bytes that were left out."""
    size: Mapped[int]
    """Its own bytes, as UTF-8."""
    text: Mapped[str] = mapped_column(Text)


class EventRow(Base):
    """An event of a job."""

    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[datetime]
    kind: Mapped[str] = mapped_column(String(64))
    payload: Mapped[dict[str, Any]]


class SubmissionRow(Base):
    """A client's idempotency key of a submission: sending it again creates no second job."""

    __tablename__ = "submissions"

    submitter: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(128), primary_key=True)
    body_hash: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))


class KeyRow(Base):
    """An API key; only a hash of its secret is stored."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    """The public part, used to list and revoke the key."""
    secret_hash: Mapped[str] = mapped_column(String(64))
    owner: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list[Any]]
    created: Mapped[datetime]
    expires: Mapped[datetime | None]
    revoked: Mapped[datetime | None]
    last_used: Mapped[datetime | None]


class QuotaRow(Base):
    """An owner's own limit, which replaces the default."""

    __tablename__ = "quotas"

    owner: Mapped[str] = mapped_column(String(64), primary_key=True)
    quota: Mapped[str] = mapped_column(String(16), primary_key=True)
    most: Mapped[float]


class AuditRow(Base):
    """An action of a user, or of a program with a key. Triggers refuse to change or remove rows."""

    __tablename__ = "audit"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    """Begins with the time, so rows sort by it."""
    time: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str | None] = mapped_column(String(16))
    source: Mapped[str] = mapped_column(String(255))
    action: Mapped[str] = mapped_column(String(32))
    target: Mapped[str] = mapped_column(String(255))
    detail: Mapped[dict[str, Any]]


class UsageRow(Base):
    """The usage of a submitter's jobs on one day."""

    __tablename__ = "usage"

    submitter: Mapped[str] = mapped_column(String(64), primary_key=True)
    day: Mapped[str] = mapped_column(String(10), primary_key=True)
    """YYYY-MM-DD, in UTC."""
    device_seconds: Mapped[float]


class WorkerRow(Base):
    """A worker, from its last heartbeat."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    host: Mapped[str] = mapped_column(Text)
    pid: Mapped[int]
    started: Mapped[datetime]
    seen: Mapped[datetime]
    job_id: Mapped[str | None] = mapped_column(String(32))
    runner: Mapped[str] = mapped_column(String(16))
    problem: Mapped[str] = mapped_column(Text)
    runners: Mapped[str] = mapped_column(Text, server_default="")
    devices: Mapped[str] = mapped_column(Text, server_default="")


class WebhookRow(Base):
    """An address that is notified when jobs of its owner end."""

    __tablename__ = "webhooks"
    __table_args__ = (Index(None, "owner"),)

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    owner: Mapped[str] = mapped_column(String(64))
    url: Mapped[str] = mapped_column(Text)
    secret: Mapped[str] = mapped_column(Text)
    """The encrypted secret (storage.secret_box)."""
    created: Mapped[datetime]


class DeliveryRow(Base):
    """The notification of one webhook about one job's end, with its tries."""

    __tablename__ = "deliveries"
    __table_args__ = (Index(None, "state", "due"), Index(None, "webhook_id", "created"))

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    created: Mapped[datetime]
    due: Mapped[datetime]
    state: Mapped[DeliveryState]
    payload: Mapped[dict[str, Any]]
    tries: Mapped[list[Any]]


class CalibrationRow(Base):
    """The result of a micro-benchmark on a cluster."""

    __tablename__ = "calibrations"
    __table_args__ = (Index(None, "fingerprint", "created"),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    created: Mapped[datetime]
    fingerprint: Mapped[str] = mapped_column(String(16))
    """Fingerprint of the cluster's hardware: the lookup key of calibrations."""
    cluster: Mapped[dict[str, Any]]
    environment: Mapped[dict[str, Any]]
    """Versions and hardware as rank 0 saw them."""
    hosts: Mapped[list[Any]]
    seconds: Mapped[float]
    context_bytes: Mapped[int | None] = mapped_column(BigInteger)
    workspace_bytes: Mapped[int | None] = mapped_column(BigInteger)
    rows: Mapped[list[Any]]


class PriorRow(Base):
    """The prior of a job from before its first trial (`autotune.strategies.guided.prior`)."""

    __tablename__ = "priors"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    prior: Mapped[dict[str, Any]]


class QuarantineRow(Base):
    """A node on which no job places ranks for a while. It outlives its job. Dumps do not include it, because it soon ends."""

    __tablename__ = "quarantine"

    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    reason: Mapped[str] = mapped_column(Text)
    job_id: Mapped[str] = mapped_column(String(32))
    since: Mapped[datetime]
    until: Mapped[datetime]


class CommitRow(Base):
    """The mark of a committed transaction, for a client whose connection broke during the commit. Only used on servers."""

    __tablename__ = "commits"
    __table_args__ = (Index(None, "time"),)

    mark: Mapped[str] = mapped_column(String(32), primary_key=True)
    time: Mapped[datetime]
