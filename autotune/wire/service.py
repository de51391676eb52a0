"""The service itself: lists of what it offers, use of quotas, audit log."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


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
class AuditEntry:
    """An entry of the audit log."""

    id: str
    time: datetime
    actor: str
    """Owner of the key, or the user of the machine on which a command ran. Empty: a user of the server's machine, if the server
    requires no keys."""
    key: str | None
    """Id of the key. None: a command on the database, or a request without a key."""
    source: str
    """Client address of the request, or machine of the command."""
    action: str
    """What was done, such as key.create."""
    target: str
    """Id of the affected object. Empty: the whole database."""
    detail: Mapping[str, Any]
    """Details, depending on the action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Entries of the audit log, newest first."""

    items: tuple[AuditEntry, ...]
    next: str | None
    """`cursor` of the next page. None: there is none."""
