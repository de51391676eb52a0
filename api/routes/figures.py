"""Figures, explanation and report of a job."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.auth import Principal, Reader, StoreOf, visible_job
from api.computing import PATIENCE_SECONDS, Computing
from api.figures import FigureBoard, JobFigures, PointsBoard
from api.routes.jobs import JobId
from api.routes.results import MOST, Number
from autotune.explain.figures.all_figures import NAMES
from autotune.reports.report import WRITERS, require_format
from autotune.wire.figures import Differences, Figure, StepParts
from autotune.wire.service import Names
from autotune.wire.trials import Points
from storage.store import Store

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["figures"])


@router.get("/points", operation_id="list_points", response_model=Points)
async def list_points(
    job_id: JobId,
    request: Request,
    store: StoreOf,
    principal: Reader,
    computing: Computing,
    since: Annotated[
        int, Query(ge=0, le=MOST, description="The `version` of the previous response; omitted: every trial.")
    ] = 0,
) -> Response:
    """Trials as columns, for plots: all of them, or those that changed since a version."""
    job = await run_in_threadpool(visible_job, store, principal, job_id)
    board: PointsBoard = request.app.state.points
    if board.knows(job_id):
        body = await run_in_threadpool(board.read, job, since)
    else:
        body = await computing.run(board.read, job, since)
    return Response(body, media_type="application/json")


@router.get("/figures", operation_id="list_figures")
def list_figures(job_id: JobId, store: StoreOf, principal: Reader) -> Names:
    """Figures by name."""
    visible_job(store, principal, job_id)
    return Names(items=tuple(NAMES))


@router.get("/figures/{name}", operation_id="get_figure", response_model=Figure)
async def get_figure(
    job_id: JobId,
    name: Annotated[str, Path(pattern=r"^[a-z_]{1,40}$", description=f"One of {', '.join(NAMES)}.")],
    request: Request,
    store: StoreOf,
    principal: Reader,
    computing: Computing,
) -> Response:
    """A figure as plain data: a summary sentence, tables, axes. If there is nothing to show, the summary says why."""
    figures = await run_in_threadpool(_figures, request, store, principal, job_id)
    # The figures of one job are computed one after another; a waiting request does not occupy a thread.
    async with _turn(figures):
        body = await computing.run(figures.figure, name)
    return Response(body, media_type="application/json")


@router.get(
    "/explanation",
    operation_id="get_explanation",
    response_model=dict[str, Any],
    responses={200: {"description": "The output of `autotune explain --json`; docs/explain.md describes it."}},
)
async def get_explanation(job_id: JobId, request: Request, store: StoreOf, principal: Reader, computing: Computing) -> Response:
    """Why the best configuration is the best: time, memory, each knob, its limits, and helpful upgrades."""
    figures = await run_in_threadpool(_figures, request, store, principal, job_id)
    async with _turn(figures):
        body = await computing.run(figures.explanation)
    return Response(body, media_type="application/json")


@router.get(
    "/report",
    operation_id="get_report",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The report file."}},
)
async def get_report(
    job_id: JobId, request: Request, store: StoreOf, principal: Reader, computing: Computing,
    format: Annotated[str, Query(max_length=40, description=f"One of {', '.join(WRITERS)}.")] = "html",
) -> Response:  # fmt: skip
    """The job as one self-contained file: every figure, its numbers, the explanation."""
    require_format(format)
    figures = await run_in_threadpool(_figures, request, store, principal, job_id)
    async with _turn(figures):
        body = await computing.run(figures.report, format)
    # A file to save, not a page of this server.
    return Response(body, media_type="application/octet-stream")


@router.get("/trials/{number}/parts", operation_id="get_parts")
async def get_parts(
    job_id: JobId, number: Number, request: Request, store: StoreOf, principal: Reader, computing: Computing
) -> StepParts:
    """The parts of a trial's measured step, by the equations."""
    figures = await run_in_threadpool(_figures, request, store, principal, job_id)
    async with _turn(figures):
        return await computing.run(figures.parts, number)


@router.get("/trials/{number}/differences", operation_id="get_differences")
async def get_differences(
    job_id: JobId, number: Number, request: Request, store: StoreOf, principal: Reader, computing: Computing,
    other: Annotated[int, Query(ge=0, le=MOST, description="The trial to compare it with.")],
) -> Differences:  # fmt: skip
    """The knobs in which another trial differs from this one, with the predicted effect of each on speed and memory."""
    figures = await run_in_threadpool(_figures, request, store, principal, job_id)
    async with _turn(figures):
        return await computing.run(figures.differences, number, other)


@asynccontextmanager
async def _turn(figures: JobFigures) -> AsyncIterator[None]:
    """Hold the turn to compute a figure of this job.

    Raises:
        HTTPException: 503, because the turn was not available in time.
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
