"""What the service offers and counts, and whom it tells of jobs that end."""

from dataclasses import dataclass, field
from datetime import datetime

from autotune.client.decoding import Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of presets."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptions:
    """Descriptions as plain data."""

    items: tuple[Plain, ...]


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
    quotas: tuple["QuotaUse", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """How far a quota is used."""

    quota: str
    """queued_jobs, stored_bytes, streams, device_hours (of the day) or webhooks."""
    used: float
    limit: float | None
    """None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Something that was done on the service or its database."""

    id: str
    time: datetime
    actor: str
    """The owner of the key, or the user of the machine on which a command ran."""
    key: str | None
    """The key's id; None: it was done without a key."""
    source: str
    """The address that the request came from, or the machine that the command ran on."""
    action: str
    target: str
    """The id of what it was done to."""
    detail: Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Entries of the audit log, newest first."""

    items: tuple[AuditEntry, ...]
    next: str | None


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
