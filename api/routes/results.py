"""The results of a job: trials, attempts, the best, exports, events."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from api.auth import Reader, StoreOf, visible_job, while_allowed
from api.computing import Computing
from api.hub import EventHub, StreamAnswer
from api.routes.jobs import JobId, Limit
from api.views import attempt_view, page, page_response
from autotune.frameworks.export import Export
from autotune.frameworks.exporters import EXPORTERS, exporter
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import read_snapshot
from autotune.session.resolve import session_of
from autotune.wire.jobs import EventPage
from autotune.wire.trials import AttemptList, TrialPage
from storage.records import ENDED, JobRecord
from storage.store import Store

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["results"])

MOST = 2**31 - 1
Number = Annotated[int, Path(ge=0, le=MOST)]
After = Annotated[int, Query(ge=0, le=MOST, description="Sequence of the last event that the client has.")]
LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", pattern=r"^[0-9]{1,9}$", description="As `after`; sent by clients that reconnect."),
]


@router.get("/trials", operation_id="list_trials", response_model=TrialPage)
def list_trials(
    job_id: JobId,
    store: StoreOf,
    principal: Reader,
    limit: Limit = 100,
    cursor: Annotated[int, Query(ge=0, le=MOST, description="The `next` of the page before.")] = 0,
) -> Response:
    """Trials by number, refused ones included."""
    visible_job(store, principal, job_id)
    parts, following, more = page(
        lambda first, most: store.trials.plain(job_id, first, most),
        cursor,
        limit,
        # Written as it was read: converting it to records and back took three times as long.
        lambda trial: to_json(trial, inf_nan_mode="null"),
        lambda trial: int(trial["number"]) + 1,
    )
    return page_response(parts, following if more else None)


@router.get("/trials/{number}/attempts", operation_id="list_attempts")
def list_attempts(job_id: JobId, number: Number, store: StoreOf, principal: Reader) -> AttemptList:
    """The attempts of a trial, superseded ones included, with their measurements."""
    visible_job(store, principal, job_id)
    return AttemptList(items=tuple(attempt_view(attempt) for attempt in store.attempts.of(job_id, number)))


@router.get(
    "/best",
    operation_id="get_best",
    response_model=dict[str, Any],
    responses={200: {"description": "docs/best-config.md describes it."}},
)
async def get_best(job_id: JobId, store: StoreOf, principal: Reader, computing: Computing) -> Response:
    """The best configuration so far."""
    job = await run_in_threadpool(visible_job, store, principal, job_id)
    return Response(await computing.run(_best_json, store, job), media_type="application/json")


@router.get(
    "/export",
    operation_id="export_best",
    response_class=Response,
    responses={
        200: {
            "content": {"application/octet-stream": {}},
            "description": "The file; the header `Autotune-Note` says what it cannot express.",
        }
    },
)
async def export_best(
    job_id: JobId,
    store: StoreOf,
    principal: Reader,
    computing: Computing,
    format: Annotated[str, Query(max_length=40, description=f"One of {', '.join(EXPORTERS)}.")] = "json",
) -> Response:
    """The best configuration as a framework's file."""
    job = await run_in_threadpool(visible_job, store, principal, job_id)
    exported = await computing.run(_exported, store, job, format)
    notes = "; ".join(exported.notes).encode("ascii", "replace").decode()
    headers = {"Autotune-Note": notes} if notes else {}
    return Response(exported.text, media_type="application/octet-stream", headers=headers)


@router.get("/events", operation_id="list_events", response_model=EventPage, responses={410: {}})
def list_events(job_id: JobId, store: StoreOf, principal: Reader, after: After = 0, limit: Limit = 1000) -> Response:
    """Events after `after`, numbered without gaps."""
    _require_kept(visible_job(store, principal, job_id), after)
    parts, following, _ = page(
        lambda first, most: store.events.of(job_id, first, most),
        after,
        limit,
        lambda event: to_json(event, inf_nan_mode="null"),
        lambda event: event.sequence,
    )
    return page_response(parts, following)


@router.get(
    "/events/stream",
    operation_id="stream_events",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "Events as they happen; the message ids are their sequences.",
        },
        204: {"description": "The job has ended, and the client has every event."},
        410: {},
    },
)
def stream_events(
    job_id: JobId,
    request: Request,
    store: StoreOf,
    principal: Reader,
    after: After = 0,
    last: LastEventId = None,
    progress: Annotated[
        bool, Query(description="Whether to send the progress of running attempts, as messages without an id.")
    ] = False,
) -> Response:
    """Server-sent events from any point on. The stream ends with the job; a client that reconnects then gets a 204 response.

    With `progress` there are also messages of the kind `progress`, about once a second for each running attempt.
    """
    job = visible_job(store, principal, job_id)
    if last is not None:
        after = int(last)
    _require_kept(job, after)
    if job.state in ENDED and job.version <= after:
        return Response(status_code=204)
    hub: EventHub = request.app.state.hub
    # If the client claims to have events that do not exist yet, start from the last existing one.
    stream = hub.stream(job_id, min(after, job.version), job.version, progress)
    return StreamAnswer(while_allowed(request, stream), request.app.state.limits, principal.owner)


def _require_kept(job: JobRecord, after: int) -> None:
    """Refuse a start among removed events: the stream would have a gap."""
    if after < job.events_removed:
        detail = f"events up to {job.events_removed} were removed because they were old; begin with after={job.events_removed}"
        raise HTTPException(410, f"after: {detail}")


def _exported(store: Store, job: JobRecord, format_name: str) -> Export:
    make = exporter(format_name)  # before the best is read, so that an unknown format is reported first
    return make(_best(store, job))


def _best_json(store: Store, job: JobRecord) -> bytes:
    return to_json(_best(store, job), inf_nan_mode="null")


def _best(store: Store, job: JobRecord) -> dict[str, Any]:
    return build_best_config(session_of(job), read_snapshot(store, job.id))
