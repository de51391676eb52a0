"""The service over one store: reads of jobs, their trials and their events."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, Query

from api import problems
from storage.records import EventRecord, JobRecord, TrialRecord
from storage.sql import open_store

Limit = Annotated[int, Query(ge=1, le=1000, description="Most items to return.")]
Before = Annotated[str | None, Query(description="The job id that the page before gave as `next`.")]
After = Annotated[int, Query(ge=0, le=2**31 - 1, description="Sequence of the last event that is known already.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """A page of jobs, newest first."""

    items: list[JobRecord]
    next: str | None
    """`before` of the next page; None: this is the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialList:
    """All trials of a job, by number."""

    items: list[TrialRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Events of a job, in order."""

    items: list[EventRecord]
    next: int
    """`after` of the next page, which may be empty still."""


def create_app(database_url: str) -> FastAPI:
    """Return the service on the database at `database_url`. Its connections are closed when the app shuts down.

    Raises:
        DatabaseUnavailableError: the database cannot be opened.
    """
    store = open_store(database_url)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        store.close()

    app = FastAPI(title="autotune", lifespan=lifespan)
    problems.install(app)

    @app.get("/livez", operation_id="live")
    async def live() -> dict[str, str]:
        """Whether the process answers; says nothing of the database."""
        return {"status": "ok"}

    # Plain functions, not coroutines: the store blocks, so FastAPI gives each call a thread.

    @app.get("/v1/jobs", operation_id="list_jobs")
    def list_jobs(limit: Limit = 50, before: Before = None) -> JobPage:
        """The newest jobs first."""
        items = store.jobs(limit, before)
        return JobPage(items=items, next=items[-1].id if len(items) == limit else None)

    @app.get("/v1/jobs/{job_id}", operation_id="get_job")
    def get_job(job_id: str) -> JobRecord:
        """One job, by its id or by a prefix that only it has."""
        return store.job(job_id)

    @app.get("/v1/jobs/{job_id}/trials", operation_id="list_trials")
    def list_trials(job_id: str) -> TrialList:
        """All trials of a job, refused ones included. Losses that are not finite read as null."""
        return TrialList(items=store.trials(store.job(job_id).id))

    @app.get("/v1/jobs/{job_id}/events", operation_id="list_events")
    def list_events(job_id: str, after: After = 0, limit: Limit = 1000) -> EventPage:
        """Events of a job beyond `after`, numbered without a gap."""
        items = store.events(store.job(job_id).id, after, limit)
        return EventPage(items=items, next=items[-1].sequence if items else after)

    return app
