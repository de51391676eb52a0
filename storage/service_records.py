"""Records of the service: webhooks and deliveries, workers, quotas and usage."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from search_spaces.shared_records import DeliveryTry


class DeliveryState(StrEnum):
    """State of a delivery. The values are stored: never rename one."""

    PENDING = "pending"
    """It is tried when it is due."""
    DELIVERED = "delivered"
    """The receiver answered with a status of 2xx."""
    GIVEN_UP = "given_up"
    """Every try failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookRecord:
    """An address that is notified when jobs of its owner end."""

    id: str
    owner: str
    url: str
    secret: str = field(repr=False)
    """The signing secret of deliveries, as stored: encrypted. `WebhookStore.signing_secret` decrypts it; only the result of
    `WebhookStore.create` has it in plain text."""
    created: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRecord:
    """The notification of one webhook about one job's end."""

    id: str
    """Sent with every try, so that receivers can detect duplicates."""
    webhook: WebhookRecord
    job_id: str
    created: datetime
    due: datetime
    """When it is tried next; while a process tries it, when another process may."""
    state: DeliveryState
    payload: Mapping[str, Any]
    tries: tuple[DeliveryTry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker, from its last heartbeat."""

    id: str
    host: str
    pid: int
    started: datetime
    seen: datetime
    job_id: str | None
    """The job that it runs."""
    runner: str
    """The runner whose ranks are warm; empty: none."""
    problem: str
    """Why its last start of ranks failed; empty: it succeeded."""
    runners: str = ""
    """The runners whose jobs it takes, with spaces between them; empty: all."""
    devices: str = ""
    """The kinds of device, cpu or cuda, whose jobs it takes; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """The usage of a submitter's jobs."""

    day: str
    """YYYY-MM-DD, in UTC."""
    device_seconds: float
    """Seconds that workers held their jobs on that day, times the devices of each."""
    running_jobs: int
    queued_jobs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A row that cannot be read."""

    place: str
    """Its table and primary key."""
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Numbers of removed old rows."""

    events: int
    deliveries: int
    submissions: int
    calibrations: int = 0
    logs: int = 0
    """Parts of the output of ranks."""


class Quota(StrEnum):
    """A quantity that is limited for each owner. The values are stored: never rename one."""

    QUEUED_JOBS = "queued_jobs"
    """Jobs that wait for a worker."""
    STORED_BYTES = "stored_bytes"
    """Bytes of the owner's requests, and of the output of their trials."""
    STREAMS = "streams"
    """Open streams of events and logs."""
    DEVICE_HOURS = "device_hours"
    """Device-hours of jobs on one day (UTC)."""
    WEBHOOKS = "webhooks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """A limit for each `Quota`; None: no limit. The defaults are those of a service; owners can have other limits."""

    queued_jobs: float | None = 1000
    stored_bytes: float | None = 2_000_000_000
    streams: float | None = 250
    device_hours: float | None = None
    webhooks: float | None = 20

    def of(self, quota: Quota) -> float | None:
        """The limit of one quota."""
        limit: float | None = getattr(self, quota)
        return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUseRecord:
    """An owner's use of a quota."""

    quota: Quota
    used: float
    most: float | None
    """None: no limit."""
    own: bool
    """Whether the limit was set for this owner and is not the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """The actor of a change: who, from where, with which default limits."""

    name: str
    """The owner of the key; without a key, the user of this machine."""
    key_id: str | None = None
    source: str = ""
    """The client address of the request; for a command, the name of the machine."""
    limits: Quotas | None = None
    """Default limits for owners without their own; None: this actor has no limits."""
