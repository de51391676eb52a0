"""Rows of the service as values: webhooks and what was sent to them, workers, quotas and what was used, who did what."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any


class DeliveryState(StrEnum):
    """What became of a delivery. The values are stored: never rename one."""

    PENDING = "pending"
    """To be tried when it is due."""
    DELIVERED = "delivered"
    """The receiver answered with a status of 2xx."""
    GIVEN_UP = "given_up"
    """Every try failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An address that is told of the jobs of its owner when they end."""

    id: str
    owner: str
    url: str
    secret: str = field(repr=False)
    """What deliveries are signed with, as it is kept: encrypted. `Store.signing_secret` decrypts it; the answer of
    `Store.create_webhook` alone has it plain."""
    created: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryTry:
    """One request to a receiver."""

    time: datetime
    seconds: float
    status: int | None
    """The receiver's answer; None: none came."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What one webhook is told of one job's end."""

    id: str
    """Sent along, the same in every try: receivers that were told twice see it."""
    webhook: Webhook
    job_id: str
    created: datetime
    due: datetime
    """When it is tried next; while somebody tries it, when another may."""
    state: DeliveryState
    payload: Mapping[str, Any]
    tries: tuple[DeliveryTry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker, as it told of itself last."""

    id: str
    host: str
    pid: int
    started: datetime
    seen: datetime
    job_id: str | None
    """The job that it runs."""
    runner: str
    """The runner whose ranks it keeps; empty: none."""
    problem: str
    """Why ranks could not be started the last time; empty where they could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the jobs of a submitter take."""

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
    """Its table and its key."""
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What was removed because it was old."""

    events: int
    deliveries: int
    submissions: int
    calibrations: int = 0
    logs: int = 0
    """Parts of what ranks printed."""


class Quota(StrEnum):
    """What there is a limit of for each owner. The values are stored: never rename one."""

    QUEUED_JOBS = "queued_jobs"
    """Jobs that wait for a worker."""
    STORED_BYTES = "stored_bytes"
    """Bytes of the owner's requests, and of what their trials printed."""
    STREAMS = "streams"
    """Streams of events and logs that are open."""
    DEVICE_HOURS = "device_hours"
    """Hours times devices that jobs take on one day (UTC)."""
    WEBHOOKS = "webhooks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """A limit for each `Quota`; None: no limit. The defaults are those of a service; each owner may have others."""

    queued_jobs: float | None = 1000
    stored_bytes: float | None = 2_000_000_000
    streams: float | None = 250
    device_hours: float | None = None
    webhooks: float | None = 20

    def of(self, quota: Quota) -> float | None:
        """The limit of one."""
        limit: float | None = getattr(self, quota)
        return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """How far an owner has used a quota."""

    quota: Quota
    used: float
    most: float | None
    """None: no limit."""
    own: bool
    """Whether the limit was set for this owner, and is not everybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who acts, from where, and what they may take."""

    name: str
    """The owner of the key; without a key the user of this machine."""
    key_id: str | None = None
    source: str = ""
    """The address that the request came from; of a command the name of the machine."""
    limits: Quotas | None = None
    """What owners may take unless they have limits of their own; None: whoever acts here is not limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """Something that was done."""

    id: str
    time: datetime
    actor: str
    key_id: str | None
    """None: without an API key, by a command on the database or where the service asks for none."""
    source: str
    action: str
    """`job.submit`, `key.revoke`, …: what it was done to, and what."""
    target: str
    """The id of what it was done to; empty: the whole database."""
    detail: Mapping[str, Any]
