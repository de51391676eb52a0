"""Output and progress of trials."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic_core import to_json

from api.auth import Reader, StoreOf, visible_job, while_allowed
from api.hub import LogHub, StreamAnswer
from api.routes.jobs import JobId, Limit
from api.routes.results import MOST, LastEventId, Number
from api.views import MOST_BYTES, page, page_response
from autotune.text.visible_text import LogText, has_several_ranks
from autotune.wire.jobs import LogPage, ProgressList
from search_spaces.shared_records import LogNews, LogPart
from storage.errors import UnknownTrialError
from storage.store import Store

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["logs"])

After = Annotated[int, Query(ge=0, le=MOST, description="Sequence of the last part that the client has.")]
Attempt = Annotated[int | None, Query(ge=1, le=MOST, description="Only this attempt; omitted: all attempts.")]
Rank = Annotated[int | None, Query(ge=0, le=MOST, description="Only this rank; omitted: all ranks.")]


@router.get("/progress", operation_id="list_progress")
def list_progress(job_id: JobId, store: StoreOf, principal: Reader) -> ProgressList:
    """The last reported progress of each running attempt."""
    visible_job(store, principal, job_id)
    return ProgressList(items=tuple(store.logs.progress([job_id])[job_id]))


@router.get("/trials/{number}/logs", operation_id="list_logs", response_model=LogPage)
def list_logs(
    job_id: JobId,
    number: Number,
    store: StoreOf,
    principal: Reader,
    after: After = 0,
    limit: Limit = 100,
    attempt: Attempt = None,
    rank: Rank = None,
) -> Response:
    """The output of a trial's ranks after the part `after`. The beginning and the end of each attempt are stored."""
    visible_job(store, principal, job_id)
    _news(store, job_id, number)
    parts, following, _ = page(
        lambda first, most: store.logs.of(job_id, number, first, most, attempt, rank),
        after,
        limit,
        to_json,
        lambda part: part.sequence,
    )
    return page_response(parts, following)


@router.get(
    "/trials/{number}/logs/text",
    operation_id="read_log",
    response_class=PlainTextResponse,
    responses={200: {"description": "The lines; with several ranks, each line begins with its rank."}},
)
def read_log(
    job_id: JobId,
    number: Number,
    store: StoreOf,
    principal: Reader,
    attempt: Attempt = None,
    rank: Rank = None,
    tail: Annotated[
        int | None, Query(ge=0, le=MOST, description="Number of last lines to return; omitted: all stored lines.")
    ] = None,
) -> Response:
    """The output as plain text, not escaped. If it exceeds 4 MB, only its end, after a line with the omitted size."""
    job = visible_job(store, principal, job_id)
    _news(store, job_id, number)
    text = LogText(with_ranks=rank is None and has_several_ranks(job.request))
    lines = text.lines(_parts(store, job_id, number, attempt, rank), gaps=rank is None)
    return PlainTextResponse(b"".join(_end_of(itertools.chain(lines, text.rest()), tail)))


@router.get(
    "/trials/{number}/logs/stream",
    operation_id="stream_logs",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "Parts as they arrive; the message ids are their sequences.",
        },
        204: {"description": "The trial has an outcome, or the job has ended, and the client has every part."},
    },
)
def stream_logs(
    job_id: JobId,
    number: Number,
    request: Request,
    store: StoreOf,
    principal: Reader,
    after: After = 0,
    last: LastEventId = None,
) -> Response:
    """Server-sent events from any point on, over all attempts. The stream ends with the trial; then the response is 204."""
    visible_job(store, principal, job_id)
    if last is not None:
        after = int(last)
    news = _news(store, job_id, number, after)
    if news.over and news.last <= after:
        return Response(status_code=204)
    hub: LogHub = request.app.state.logs
    # If the client claims to have parts that do not exist yet, start from the last existing one.
    stream = hub.stream((job_id, number), min(after, news.last), news.last)
    return StreamAnswer(while_allowed(request, stream), request.app.state.limits, principal.owner)


def _news(store: Store, job_id: str, number: int, after: int = MOST) -> LogNews:
    """The state of a trial's output.

    Raises:
        UnknownTrialError: there is no such trial.
    """
    news = store.logs.news({(job_id, number): after}, 1).get((job_id, number))
    if news is None:
        raise UnknownTrialError(f"number: job {job_id} has no trial {number}; list the trials with GET …/trials")
    return news


def _end_of(lines: Iterable[str], most: int | None) -> Iterator[bytes]:
    """The last lines, at most `most` and at most `MOST_BYTES`; no more is held in memory."""
    tail: deque[bytes] = deque()
    size = left_out = 0
    for line in lines:
        tail.append(f"{line}\n".encode())
        size += len(tail[-1])
        while len(tail) > 1 and size > MOST_BYTES:
            size -= len(tail[0])
            left_out += len(tail.popleft())
        if most is not None and len(tail) > most:
            size -= len(tail.popleft())
    if left_out and (most is None or len(tail) < most):
        yield f"--- {left_out:,} bytes left out: GET …/logs has all, in pages ---\n".encode()
    yield from tail


def _parts(store: Store, job_id: str, number: int, attempt: int | None, rank: int | None) -> Iterator[LogPart]:
    after = 0
    while parts := store.logs.of(job_id, number, after, 100, attempt, rank):
        yield from parts
        after = parts[-1].sequence
