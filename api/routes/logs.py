"""What trials print and do while they run."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from api.auth import Reader, StoreOf, visible_job, while_allowed
from api.hub import StreamAnswer
from api.logs import LogHub
from api.paging import MOST_BYTES, page, page_response
from api.routes.jobs import JobId, Limit
from api.routes.results import MOST, LastEventId, Number
from api.views import LogPage, ProgressList, log_view, progress_view
from autotune.ops.trial_log import LogText, has_several_ranks
from storage.errors import UnknownTrialError
from storage.log_records import LogNews, LogRecord
from storage.store import Store

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["logs"])

After = Annotated[int, Query(ge=0, le=MOST, description="Sequence of the last part that is known already.")]
Attempt = Annotated[int | None, Query(ge=1, le=MOST, description="This attempt's alone; left out: of all.")]
Rank = Annotated[int | None, Query(ge=0, le=MOST, description="This rank's alone; left out: of all.")]
Tail = Annotated[int | None, Query(ge=0, le=MOST, description="Last lines to return; left out: all that are kept.")]


@router.get("/progress", operation_id="list_progress")
def list_progress(job_id: JobId, store: StoreOf, principal: Reader) -> ProgressList:
    """What each running attempt did when it was heard last."""
    visible_job(store, principal, job_id)
    return ProgressList(items=[progress_view(sign) for sign in store.progress([job_id])[job_id]])


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
    """What the ranks of a trial printed, beyond the part `after`: the beginning and the end of each attempt."""
    visible_job(store, principal, job_id)
    _news(store, job_id, number)
    parts, following, _ = page(
        lambda first, most: store.logs(job_id, number, first, most, attempt, rank),
        after,
        limit,
        lambda part: log_view(part).model_dump_json().encode(),
        lambda part: part.sequence,
    )
    return page_response(parts, following)


@router.get(
    "/trials/{number}/logs/text",
    operation_id="read_log",
    response_class=PlainTextResponse,
    responses={200: {"description": "The lines; where there are several ranks, each begins with its own."}},
)
def read_log(
    job_id: JobId,
    number: Number,
    store: StoreOf,
    principal: Reader,
    attempt: Attempt = None,
    rank: Rank = None,
    tail: Tail = None,
) -> Response:
    """The same as plain text, nothing escaped. Of more than 4 MB the end, below a line that tells how much is left out."""
    job = visible_job(store, principal, job_id)
    _news(store, job_id, number)
    text = LogText(named=rank is None and has_several_ranks(job.request))
    lines = text.lines(_parts(store, job_id, number, attempt, rank), gaps=rank is None)
    return PlainTextResponse(b"".join(_end_of(itertools.chain(lines, text.rest()), tail)))


@router.get(
    "/trials/{number}/logs/stream",
    operation_id="stream_logs",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "Parts as they come; their ids are their sequences."},
        204: {"description": "The trial has its outcome, or the job has ended, and every part is known."},
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
    """Server-sent events from any point on, over all attempts. The stream ends with the trial; 204 tells so afterwards."""
    visible_job(store, principal, job_id)
    if last is not None:
        after = int(last)
    news = _news(store, job_id, number, after)
    if news.over and news.last <= after:
        return Response(status_code=204)
    hub: LogHub = request.app.state.logs
    # Whoever claims to know parts that are not there yet is told from the last one on.
    stream = hub.stream((job_id, number), min(after, news.last), news.last)
    return StreamAnswer(while_allowed(request, stream), request.app.state.limits, principal.owner)


def _news(store: Store, job_id: str, number: int, after: int = MOST) -> LogNews:
    """How it stands with the output of a trial.

    Raises:
        UnknownTrialError: there is no such trial.
    """
    news = store.log_news({(job_id, number): after}, 1).get((job_id, number))
    if news is None:
        raise UnknownTrialError(f"number: job {job_id} has no trial {number}; list those that there are with GET …/trials")
    return news


def _end_of(lines: Iterable[str], most: int | None) -> Iterator[bytes]:
    """The last lines, at most so many, and at most `MOST_BYTES` of them: no more than that is in memory."""
    kept: deque[bytes] = deque()
    size = left_out = 0
    for line in lines:
        kept.append(f"{line}\n".encode())
        size += len(kept[-1])
        while len(kept) > 1 and size > MOST_BYTES:
            size -= len(kept[0])
            left_out += len(kept.popleft())
        if most is not None and len(kept) > most:
            size -= len(kept.popleft())
    if left_out and (most is None or len(kept) < most):
        yield f"--- {left_out:,} bytes left out: GET …/logs has all, in pages ---\n".encode()
    yield from kept


def _parts(store: Store, job_id: str, number: int, attempt: int | None, rank: int | None) -> Iterator[LogRecord]:
    after = 0
    while parts := store.logs(job_id, number, after, 100, attempt, rank):
        yield from parts
        after = parts[-1].sequence
