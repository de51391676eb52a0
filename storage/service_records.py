"""Rows of the service as values: webhooks and what was sent to them, workers, what was used."""

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
    """What deliveries are signed with: a receiver that knows it knows who sent them."""
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
