"""Figures, explanation and report of a job: computed on request, and cached for the most recently requested jobs.

The figures of one version of a job share their data source; a request for trials costs only what is new."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic_core import to_json

from api.auth import Principal, Reader, StoreOf, visible_job
from api.computing import PATIENCE_SECONDS, Computing
from api.routes.jobs import JobId
from api.routes.results import MOST, Number
from autotune.explain.evidence import question_of_job
from autotune.explain.explain import explain, explain_evidence, knob_differences
from autotune.explain.figures import NAMES, figure_of
from autotune.explain.figures.points import JobPoints
from autotune.explain.figures.source import FigureSource
from autotune.explain.limits import parts_of
from autotune.forecast import initial_forecaster_of
from autotune.objective.ranking import rate
from autotune.prediction.planning.estimate import estimates
from autotune.prediction.planning.question import Question
from autotune.reports.report import WRITERS, report_text, require_format
from autotune.session.resolve import session_of
from autotune.wire.figures import Differences, Figure, StepPart, StepParts
from autotune.wire.service import Names
from autotune.wire.trials import Points
from search_spaces.plain import to_plain
from storage.errors import UnknownTrialError
from storage.records import JobRecord, TrialRecord
from storage.store import Store

EXPLANATION = "explanation"


class JobFigures:
    """The figures of one job at one version. `turn` is held while a figure is computed, so that only one thread does it."""

    def __init__(self, store: Store, job: JobRecord) -> None:
        self.version = job.version
        self.turn = asyncio.Lock()
        self._source = FigureSource(store, job.id)
        self._made: dict[str, bytes] = {}

    def figure(self, name: str) -> bytes:
        """The `Figure` as JSON.

        Raises:
            UnknownNameError: there is no figure of that name.
        """
        if name not in self._made:
            self._made[name] = to_json(to_plain(figure_of(self._source, name)), inf_nan_mode="null")
        return self._made[name]

    def parts(self, number: int) -> StepParts:
        """The parts of a trial's step.

        Raises:
            UnknownTrialError: there is no such trial.
        """
        trial, session = self._trial(number), self._source.session
        if session is None or not rate(trial):
            return StepParts(trial=number, step_seconds=None, parts=(), note="nothing was measured")
        seconds = session.request.global_batch_size / rate(trial)
        if self._question is None:
            return StepParts(trial=number, step_seconds=seconds, parts=(), note=self._source.unpredicted)
        (predicted,) = estimates(self._question, [trial.config])
        parts = tuple(StepPart(name=part.name, seconds=part.seconds, share=part.share) for part in parts_of(predicted, seconds))
        return StepParts(trial=number, step_seconds=seconds, parts=parts, note=f"by {self._question.calibration_source}")

    def differences(self, number: int, other: int) -> Differences:
        """The knobs in which trial `other` differs from trial `number`, with the predicted effect of each.

        Raises:
            UnknownTrialError: there is no such trial.
        """
        before, after = self._trial(number), self._trial(other)
        session, question = self._source.session, self._question
        total, knobs = (None, ()) if session is None else knob_differences(session.space, question, before.config, after.config)
        rates = rate(before), rate(after)
        return Differences(
            trial=number,
            other=other,
            measured_speed=rates[1] / rates[0] if all(rates) else None,
            total=total,
            knobs=knobs,
            note=self._source.unpredicted if question is None else f"by {question.calibration_source}",
        )

    def _trial(self, number: int) -> TrialRecord:
        snapshot = self._source.snapshot
        if number >= len(snapshot.trials):
            raise UnknownTrialError(f"job {snapshot.job.id} has no trial {number}; list them with GET /v1/jobs/{{id}}/trials")
        return snapshot.trial(number)

    def explanation(self) -> bytes:
        """The `Explanation` as JSON.

        Raises:
            NoBestError: no trial has won.
        """
        if EXPLANATION not in self._made:
            evidence = self._source.evidence
            explanation = explain(self._source.store, self._source.job.id) if evidence is None else explain_evidence(evidence)
            self._made[EXPLANATION] = to_json(to_plain(explanation), inf_nan_mode="null")
        return self._made[EXPLANATION]

    def report(self, format_name: str) -> bytes:
        """The report as a file's content. Cached like figures, since a client that times out asks again.

        Raises:
            UnknownFormatError: there is no such format.
        """
        name = f"report.{format_name}"
        if name not in self._made:
            self._made[name] = report_text(self._source.store, self._source.job.id, format_name).encode()
        return self._made[name]

    @cached_property
    def _question(self) -> Question | None:
        session = self._source.session
        return None if session is None else question_of_job(self._source.store, session)


class FigureBoard:
    """Cache of the figures of the most recently requested jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, JobFigures] = OrderedDict()

    def of(self, job: JobRecord) -> JobFigures:
        """The figures of a job at its present version."""
        with self._lock:
            figures = self._jobs.get(job.id)
            if figures is None or figures.version != job.version:
                figures = self._jobs[job.id] = JobFigures(self._store, job)
            self._jobs.move_to_end(job.id)
            # Most jobs whose figures are cached, until they change or other jobs replace them.
            if len(self._jobs) > 4:
                self._jobs.popitem(last=False)
            return figures


class PointsBoard:
    """Cache of the most recently requested jobs."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, JobPoints] = OrderedDict()

    def knows(self, job_id: str) -> bool:
        """Whether the job's trials are cached, so that reading the changes is quick."""
        return job_id in self._jobs

    def read(self, job: JobRecord, since: int) -> bytes:
        """The `Points` of the job as JSON. Raises what `session_of` raises."""
        with self._lock:
            points = self._jobs.get(job.id)
        if points is None:
            session = session_of(job)
            new_points = JobPoints(self._store, job, session, initial_forecaster_of(self._store, job.id, session))
            with self._lock:
                points = self._jobs.setdefault(job.id, new_points)
        body = to_json(points.read(since), inf_nan_mode="null")
        self._keep(job.id)
        return body

    def _keep(self, job_id: str) -> None:
        with self._lock:
            if job_id in self._jobs:
                self._jobs.move_to_end(job_id)
            # A cached trial takes about two kilobytes. The most recently requested job is always kept.
            while len(self._jobs) > 1 and sum(map(len, self._jobs.values())) > 50_000:
                self._jobs.popitem(last=False)


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
