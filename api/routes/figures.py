"""What pages draw of a job."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.auth import Reader, StoreOf, visible_job
from api.computing import Computing, place
from api.point_views import PointsView
from api.points import PointsBoard
from api.routes.jobs import JobId
from api.routes.results import MOST

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["figures"])

Since = Annotated[int, Query(ge=0, le=MOST, description="The `version` of the answer before; left out: every trial.")]


@router.get("/points", operation_id="list_points", response_model=PointsView)
async def list_points(
    job_id: JobId, request: Request, store: StoreOf, principal: Reader, computing: Computing, since: Since = 0
) -> Response:
    """Trials as columns, for plots: all of them, or those that changed since."""
    job = await run_in_threadpool(visible_job, store, principal, job_id)
    board: PointsBoard = request.app.state.points
    if board.knows(job_id):
        body = await run_in_threadpool(board.read, job, since)
    else:
        async with place(computing):
            body = await run_in_threadpool(board.read, job, since)
    return Response(body, media_type="application/json")
