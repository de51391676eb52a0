"""Whether the service lives, is ready, and how it does."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from api.auth import Administrator, Reader, StoreOf
from api.hub import Hub
from api.limits import OwnerLimits
from api.metrics import Metrics
from autotune.errors import RequestError
from storage.errors import DatabaseUnavailableError
from storage.migrations import HEAD
from storage.service_records import WorkerRecord
from storage.store import Store

router = APIRouter(tags=["operations"])

log = logging.getLogger(__name__)

ROOM_SECONDS = 5.0
"""How long an answer about the disk holds."""
FAILURES = 3
"""Failures in a row after which streams count as broken."""
SEEN_SECONDS = 60.0
"""A worker that gave no sign of life for so long counts as gone."""


class Health(BaseModel):
    """How the process does."""

    status: str = "ok"


class Readiness(BaseModel):
    """What the service needs, and how each of it is."""

    status: str
    """`ok`; `degraded`: requests are answered, but no job is run, or not every one; `unavailable`."""
    database: str
    migration: str
    workers: str
    ray: str
    disk: str
    """Whether something can be written."""
    streams: str
    """Whether event and log streams of this process hear of what is new."""


class UsageView(BaseModel):
    """What a submitter's jobs take."""

    submitter: str
    day: str
    """YYYY-MM-DD, in UTC."""
    device_seconds: float
    """Seconds that workers held their jobs on that day, times the devices of each."""
    running_jobs: int
    queued_jobs: int
    quotas: list["QuotaView"]


class QuotaView(BaseModel):
    """How far a quota is used."""

    quota: str
    used: float
    limit: float | None
    """null: there is none."""


class AuditView(BaseModel):
    """Something that was done."""

    id: str
    time: datetime
    actor: str
    """The owner of the key; empty: somebody on this machine, where no keys are asked for."""
    key: str | None
    """The key's id; null: it was done by a command on the database, or without a key."""
    source: str
    """The address that the request came from, or the machine that the command ran on."""
    action: str
    target: str
    """The id of what it was done to."""
    detail: dict[str, Any]


class AuditPage(BaseModel):
    """Entries of the audit log, newest first."""

    items: list[AuditView]
    next: str | None
    """The `cursor` of the next page; null: there is none."""


@router.get("/livez", operation_id="live")
async def live() -> Health:
    """Whether the process answers; says nothing of the database."""
    return Health()


@router.get(
    "/readyz",
    operation_id="ready",
    responses={503: {"model": Readiness, "description": "The database cannot be used, or has other tables."}},
)
def ready(store: StoreOf, request: Request, response: Response) -> Readiness:
    """Whether requests can be answered: 503 where not. Jobs wait in the queue while no worker is there: that is `degraded`."""
    state = request.app.state
    found = readiness(store, state.room, [state.hub, state.logs])
    if found.status == "unavailable":
        response.status_code = 503
    return found


@router.get(
    "/metrics",
    operation_id="metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Figures in the text format of Prometheus."}},
)
def metrics(request: Request, principal: Reader) -> Response:
    """Jobs by state, trials by outcome and duration, the queue, workers, requests; the best of each running job that is yours,
    or of each for an operator."""
    found: Metrics = request.app.state.metrics
    return Response(
        found.text(None if principal.sees_all else principal.owner), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


@router.get("/v1/usage", operation_id="get_usage")
def get_usage(
    request: Request,
    store: StoreOf,
    principal: Reader,
    submitter: Annotated[
        str | None, Query(max_length=64, pattern=r"^[^\x00]*$", description="Whose; for others than you, operate is needed.")
    ] = None,
) -> UsageView:
    """What you have taken of your quotas, and what your jobs take today. Where workers have a limit of running jobs, or of
    device-seconds, further jobs wait."""
    whose = submitter if submitter is not None and principal.sees_all else principal.owner
    used = store.usage(whose)
    limits: OwnerLimits = request.app.state.limits
    return UsageView(
        submitter=whose, day=used.day, device_seconds=round(used.device_seconds, 3), running_jobs=used.running_jobs,
        queued_jobs=used.queued_jobs,
        quotas=[QuotaView(quota=item.quota, used=item.used, limit=item.most) for item in limits.uses(whose)],
    )  # fmt: skip


@router.get("/v1/audit", operation_id="list_audit")
def list_audit(
    store: StoreOf,
    _: Administrator,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most items to return.")] = 100,
    cursor: Annotated[str | None, Query(pattern=r"^[0-9a-z-]{1,32}$", description="The `next` of the page before.")] = None,
    since: Annotated[
        str | None,
        Query(
            pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})$",
            description="Nothing before, in ISO 8601 with a zone.",
            json_schema_extra={"format": "date-time"},
        ),
    ] = None,
    actor: Annotated[str | None, Query(max_length=64, pattern=r"^[^\x00]*$", description="What this owner did.")] = None,
    action: Annotated[str | None, Query(max_length=32, pattern=r"^[a-z.]*$", description="Such as key.create.")] = None,
) -> AuditPage:
    """Who did what, from where, and with which key. Nothing changes or removes an entry."""
    try:
        begin = None if since is None else datetime.fromisoformat(since).astimezone(UTC)
    except (ValueError, OverflowError):
        raise RequestError("since", f"{since!r} is no time", "write it like 2026-01-31T12:00:00Z") from None
    items = store.audit(limit + 1, cursor, begin, actor, action)
    shown = [
        AuditView(
            id=item.id, time=item.time, actor=item.actor, key=item.key_id, source=item.source, action=item.action,
            target=item.target, detail=dict(item.detail),
        )
        for item in items[:limit]
    ]  # fmt: skip
    return AuditPage(items=shown, next=items[limit - 1].id if len(items) > limit else None)


class Room:
    """Whether something can be written, found out once for the requests of some seconds: who asks needs no key."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._until, self._is_there = -math.inf, True

    def is_there(self) -> bool:
        """Whether there is room."""
        with self._lock:
            if self._clock() >= self._until:
                try:
                    self._store.check_room()
                    self._is_there = True
                except DatabaseUnavailableError as error:
                    log.error("%s", error)
                    self._is_there = False
                self._until = self._clock() + ROOM_SECONDS
            return self._is_there


def readiness(store: Store, room: Room, hubs: Sequence[Hub[Any]]) -> Readiness:
    """How the service does. Nothing of it names hosts, paths or errors: who asks needs no key."""
    try:
        revision, workers = store.revision(), None
        if revision == HEAD:
            workers = store.workers(SEEN_SECONDS)
    except DatabaseUnavailableError:
        return _unavailable(database="cannot be used")
    if workers is None:
        told = f"{revision}, and this server needs {HEAD}"
        return _unavailable(database="ok", migration=told)
    if not room.is_there():
        return _unavailable(database="ok", migration=revision, disk="full, or nearly: the log has the reason")
    failing = any(hub.failures >= FAILURES for hub in hubs)
    ray = _ray(workers)
    status = "ok" if workers and not ray.startswith("failed") and not failing else "degraded"
    seen = f"{len(workers)} seen within {SEEN_SECONDS:.0f} s" if workers else f"none seen within {SEEN_SECONDS:.0f} s"
    streams = "failed: news cannot be read; the log has the reason" if failing else "ok"
    return Readiness(
        status=status, database="ok", migration=revision, workers=seen, ray=ray, disk="ok", streams=streams
    )  # fmt: skip


def _unavailable(**known: str) -> Readiness:
    unknown = dict.fromkeys(("migration", "workers", "ray", "disk", "streams"), "-")
    return Readiness(status="unavailable", **{**unknown, **known})


def _ray(workers: list[WorkerRecord]) -> str:
    """Ray as the workers know it: they start it for the first job that needs it."""
    if any(worker.runner == "ray" and not worker.problem for worker in workers):
        return "ok"
    if any(worker.runner == "ray" for worker in workers):
        return "failed: ranks could not be started; the workers' log has the reason"
    return "not used yet"
