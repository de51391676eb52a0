"""The service itself: lists of what it offers, use of quotas, audit log, webhooks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from search_spaces.shared_records import AuditEntry, DeliveryTry


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names of presets or figures."""

    items: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptions:
    """Descriptions as plain data."""

    items: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """The use of a quota."""

    quota: str
    """queued_jobs, stored_bytes, streams, device_hours (of the day) or webhooks."""
    used: float
    """In the unit of the quota."""
    limit: float | None
    """In the unit of the quota. None: there is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resource use of a submitter's jobs."""

    submitter: str
    day: str
    """YYYY-MM-DD, in UTC."""
    device_seconds: float
    """Seconds for which workers held the jobs on that day, times the devices of each job."""
    running_jobs: int
    queued_jobs: int
    quotas: tuple[QuotaUse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Entries of the audit log, newest first."""

    items: tuple[AuditEntry, ...]
    next: str | None
    """`cursor` of the next page. None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An address that the service calls when a job of its owner ends."""

    id: str
    owner: str
    url: str
    created: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWebhook(Webhook):
    """A webhook with its secret, which the service shows only once."""

    secret: str = field(repr=False)
    """The key that signs deliveries, as specified by https://www.standardwebhooks.com."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookList:
    """Webhooks, oldest first."""

    items: tuple[Webhook, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A notification of a webhook: sent, or still to be sent."""

    id: str
    """The `webhook-id` of every try."""
    job: str
    """Id of the job that ended."""
    created: datetime
    state: str
    """pending, delivered or given_up."""
    due: datetime | None
    """Time of the next try. None: there is none."""
    tries: tuple[DeliveryTry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryList:
    """Deliveries, newest first."""

    items: tuple[Delivery, ...]
