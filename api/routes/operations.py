"""Health, readiness, metrics, usage and audit log of the service."""

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
from autotune.wire.service import AuditPage, QuotaUse, Usage, Worker, WorkerList
from storage.errors import DatabaseUnavailableError
from storage.migrations import HEAD
from storage.service_records import WorkerRecord
from storage.store import Store

router = APIRouter(tags=["operations"])

log = logging.getLogger(__name__)


class Health(BaseModel):
    """The state of the process."""

    status: str = "ok"


class Readiness(BaseModel):
    """The state of the service and of each of its dependencies."""

    status: str
    """`ok`; `degraded`: the service responds, but some or all jobs cannot run; `unavailable`."""
    database: str
    migration: str
    workers: str
    ray: str
    disk: str
    """Whether the database can be written."""
    streams: str
    """Whether the event and log streams of this process receive updates."""


@router.get("/livez", operation_id="live")
async def live() -> Health:
    """Whether the process responds; does not check the database."""
    return Health()


@router.get(
    "/readyz",
    operation_id="ready",
    responses={503: {"model": Readiness, "description": "The database is unavailable, or has another schema revision."}},
)
def ready(store: StoreOf, request: Request, response: Response) -> Readiness:
    """Whether the service can handle requests; if not, 503. Without workers, jobs wait in the queue: that is `degraded`."""
    state = request.app.state
    readiness_report = readiness(store, state.disk, [state.hub, state.logs])
    if readiness_report.status == "unavailable":
        response.status_code = 503
    return readiness_report


@router.get(
    "/metrics",
    operation_id="metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Metrics in the Prometheus text format."}},
)
def metrics(request: Request, principal: Reader) -> Response:
    """Jobs by state, trials by outcome and duration, the queue, workers, requests; the best of each of your running jobs, or of
    all running jobs for an operator."""
    service_metrics: Metrics = request.app.state.metrics
    return Response(
        service_metrics.text(None if principal.sees_all else principal.owner),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


@router.get("/v1/usage", operation_id="get_usage")
def get_usage(
    request: Request,
    store: StoreOf,
    principal: Reader,
    submitter: Annotated[
        str | None,
        Query(max_length=64, pattern=r"^[^\x00]*$", description="The submitter; others than you require the scope operate."),
    ] = None,
) -> Usage:
    """Your use of your quotas, and the resource use of your jobs today. Jobs beyond the workers' limits of running jobs or
    device-seconds wait."""
    owner = submitter if submitter is not None and principal.sees_all else principal.owner
    used = store.workers.usage(owner)
    limits: OwnerLimits = request.app.state.limits
    quotas = (
        QuotaUse(quota=str(item.quota), used=float(item.used), limit=None if item.most is None else float(item.most))
        for item in limits.uses(owner)
    )
    return Usage(
        submitter=owner, day=used.day, device_seconds=round(float(used.device_seconds), 3), running_jobs=used.running_jobs,
        queued_jobs=used.queued_jobs, quotas=tuple(quotas),
    )  # fmt: skip


@router.get("/v1/workers", operation_id="list_workers")
def list_workers(store: StoreOf, principal: Reader) -> WorkerList:
    """The workers that gave a sign of life within a minute: what they take, and whether they are well. The scope operate shows
    why one is not."""
    hidden = "its ranks could not be started; an operator sees why"
    return WorkerList(
        items=tuple(
            Worker(
                host=worker.host,
                pid=worker.pid,
                started=worker.started,
                seen=worker.seen,
                runners=tuple(worker.runners.split()),
                devices=tuple(worker.devices.split()),
                is_busy=worker.job_id is not None,
                problem=worker.problem if principal.sees_all or not worker.problem else hidden,
            )
            for worker in store.workers.alive()
        )
    )


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
            description="Only entries from this time on, in ISO 8601 with a zone.",
            json_schema_extra={"format": "date-time"},
        ),
    ] = None,
    actor: Annotated[str | None, Query(max_length=64, pattern=r"^[^\x00]*$", description="Only actions of this owner.")] = None,
    action: Annotated[
        str | None, Query(max_length=32, pattern=r"^[a-z.]*$", description="Only this action, such as key.create.")
    ] = None,
) -> AuditPage:
    """Who did what, from where, and with which key. Entries are never changed or removed."""
    try:
        begin = None if since is None else datetime.fromisoformat(since).astimezone(UTC)
    except (ValueError, OverflowError):
        raise RequestError("since", f"{since!r} is not a time", "write it like 2026-01-31T12:00:00Z") from None
    items = store.audit.newest(limit + 1, cursor, begin, actor, action)
    return AuditPage(items=tuple(items[:limit]), next=items[limit - 1].id if len(items) > limit else None)


class DiskCheck:
    """Checks whether the database can be written, and caches the result for some seconds, because /readyz needs no key."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._until, self._is_writable = -math.inf, True

    def is_writable(self) -> bool:
        """Whether the database can be written."""
        with self._lock:
            if self._clock() >= self._until:
                try:
                    self._store.check_writable()
                    self._is_writable = True
                except DatabaseUnavailableError as error:
                    log.error("%s", error)
                    self._is_writable = False
                self._until = self._clock() + 5.0  # how long the result is cached
            return self._is_writable


def readiness(store: Store, disk: DiskCheck, hubs: Sequence[Hub[Any]]) -> Readiness:
    """The state of the service. It contains no hosts, paths or errors, because the route needs no key."""
    # A worker without a heartbeat for this long counts as gone.
    seen_seconds = 60.0
    try:
        revision, workers = store.revision(), None
        if revision == HEAD:
            workers = store.workers.alive(seen_seconds)
    except DatabaseUnavailableError:
        return _unavailable(database="cannot be used")
    if workers is None:
        mismatch = f"{revision}, and this server needs {HEAD}"
        return _unavailable(database="ok", migration=mismatch)
    if not disk.is_writable():
        return _unavailable(database="ok", migration=revision, disk="full or nearly full: see the log for the reason")
    # Consecutive failures after which streams count as broken.
    failing = any(hub.failures >= 3 for hub in hubs)
    ray = _ray(workers)
    status = "ok" if workers and not ray.startswith("failed") and not failing else "degraded"
    worker_text = f"{len(workers)} seen within {seen_seconds:.0f} s" if workers else f"none seen within {seen_seconds:.0f} s"
    streams = "failed: news cannot be read; the log has the reason" if failing else "ok"
    return Readiness(
        status=status, database="ok", migration=revision, workers=worker_text, ray=ray, disk="ok", streams=streams
    )  # fmt: skip


def _unavailable(**components: str) -> Readiness:
    unknown = dict.fromkeys(("migration", "workers", "ray", "disk", "streams"), "-")
    return Readiness(status="unavailable", **{**unknown, **components})


def _ray(workers: list[WorkerRecord]) -> str:
    """The state of Ray as reported by the workers, which start it for the first job that needs it."""
    if any(worker.runner == "ray" and not worker.problem for worker in workers):
        return "ok"
    if any(worker.runner == "ray" for worker in workers):
        return "failed: ranks could not be started; the workers' log has the reason"
    return "not used yet"
