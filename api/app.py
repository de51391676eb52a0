"""The service over one store."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import Lifespan

from api import problems
from api.events import EventHub
from api.guard import VERSION, Guard
from api.routes import catalog, jobs, operations, results
from api.settings import Settings
from storage.sql import open_store


def create_app(settings: Settings) -> FastAPI:
    """Return the service. Its connections are closed when the app shuts down.

    Raises:
        DatabaseUnavailableError: the database cannot be opened.
    """
    store = open_store(settings.database_url)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        app.state.hub.close()
        store.close()

    app = with_routes(lifespan)
    app.state.store, app.state.settings = store, settings
    app.state.hub = EventHub(store)
    app.state.counting = threading.BoundedSemaphore(settings.counts_at_once)
    app.add_middleware(Guard, settings=settings)
    return app


def with_routes(lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """The interface alone: its routes, and how it tells of errors."""
    app = FastAPI(
        title="autotune",
        version=VERSION,
        description="Submit tuning jobs, follow them, and take the best configuration away.",
        lifespan=lifespan,
        separate_input_output_schemas=False,
    )
    problems.install(app)
    for routes in (operations, jobs, results, catalog):
        app.include_router(routes.router)
    return app
