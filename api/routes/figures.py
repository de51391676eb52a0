"""What pages draw of a job."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.auth import Principal, Reader, StoreOf, visible_job
from api.computing import PATIENCE_SECONDS, Computing
from api.figure_views import FigureView, PartsView
from api.figures import FigureBoard, JobFigures
from api.point_views import PointsView
from api.points import PointsBoard
from api.routes.jobs import JobId
from api.routes.results import MOST, Number
from api.views import NameList
from autotune.explain.figures.all_figures import NAMES
from autotune.reports.formats import WRITERS, require_format
from storage.store import Store

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["figures"])

Since = Annotated[int, Query(ge=0, le=MOST, description="The `version` of the answer before; left out: every trial.")]
FigureName = Annotated[str, Path(pattern=r"^[a-z_]{1,40}$", description=f"One of {', '.join(NAMES)}.")]


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
        body = await computing.run(board.read, job, since)
    return Response(body, media_type="application/json")


@router.get("/figures", operation_id="list_figures")
def list_figures(job_id: JobId, store: StoreOf, principal: Reader) -> NameList:
    """Figures by name."""
    visible_job(store, principal, job_id)
    return NameList(items=list(NAMES))


@router.get("/figures/{name}", operation_id="get_figure", response_model=FigureView)
async def get_figure(
    job_id: JobId, name: FigureName, request: Request, store: StoreOf, principal: Reader, computing: Computing
) -> Response:
    """A figure as plain data: what it says in a sentence, its tables, its axes. Nothing to show is told in the sentence."""
    figures = await run_in_threadpool(_figures, request, store, principal, job_id)
    # Those of one job are made one after another: who waits for the others takes no place.
    async with _turn(figures):
        body = await computing.run(figures.figure, name)
    return Response(body, media_type="application/json")


@router.get(
    "/explanation",
    operation_id="get_explanation",
    response_model=dict[str, Any],
    responses={200: {"description": "What `autotune explain --json` prints; docs/explain.md says what it holds."}},
)
async def get_explanation(job_id: JobId, request: Request, store: StoreOf, principal: Reader, computing: Computing) -> Response:
    """Why the best configuration is the best: time, memory, each knob, what limits it, what would help."""
    figures = await run_in_threadpool(_figures, request, store, principal, job_id)
    async with _turn(figures):
        body = await computing.run(figures.explanation)
    return Response(body, media_type="application/json")


@router.get(
    "/report",
    operation_id="get_report",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The file, to be saved and opened."}},
)
async def get_report(
    job_id: JobId, request: Request, store: StoreOf, principal: Reader, computing: Computing,
    format: Annotated[str, Query(max_length=40, description=f"One of {', '.join(WRITERS)}.")] = "html",
) -> Response:  # fmt: skip
    """The job as one file that opens anywhere: every figure, its numbers, the explanation."""
    require_format(format)
    figures = await run_in_threadpool(_figures, request, store, principal, job_id)
    async with _turn(figures):
        body = await computing.run(figures.report, format)
    # A file to save, not a page of this server.
    return Response(body, media_type="application/octet-stream")


@router.get("/trials/{number}/parts", operation_id="get_parts")
async def get_parts(
    job_id: JobId, number: Number, request: Request, store: StoreOf, principal: Reader, computing: Computing
) -> PartsView:
    """Where a trial's measured step goes, by the equations."""
    figures = await run_in_threadpool(_figures, request, store, principal, job_id)
    async with _turn(figures):
        return await computing.run(figures.parts, number)


@asynccontextmanager
async def _turn(figures: JobFigures) -> AsyncIterator[None]:
    """The turn to make a figure of this job.

    Raises:
        HTTPException: 503, because it did not come in time.
    """
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await figures.turn.acquire()
    except TimeoutError:
        raise HTTPException(503, "too many ask for figures of this job; try again", {"Retry-After": "5"}) from None
    try:
        yield
    finally:
        figures.turn.release()


def _figures(request: Request, store: Store, principal: Principal, job_id: str) -> JobFigures:
    board: FigureBoard = request.app.state.figures
    return board.of(visible_job(store, principal, job_id))
