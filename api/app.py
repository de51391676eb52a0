"""Creates the service for one store; answers HEAD requests as GET requests without a body."""

import asyncio
import gc
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from api import problems
from api.auth import KeyReader
from api.computing import RequestBatcher, ThreadPool, ThreadPools
from api.connections import ConnectionLimits, Connections
from api.deliverer import Deliverer, deliver, networks
from api.document import DocumentedApp
from api.guard import VERSION, RequestGuard
from api.hub import EventHub, LogHub
from api.identity import ProxyIdentities
from api.limits import KnownKeys, OwnerLimits
from api.metrics import Metrics, ProcessMetrics, RequestTimer
from api.routes import catalog, figures, jobs, logs, operations, page, predictions, results, webhooks
from api.routes.figures import FigureBoard, PointsBoard
from api.settings import Settings
from autotune.logs import are_traced
from autotune.session.resolved import Resolver
from search_spaces.plain import from_plain
from search_spaces.preset_files import preset_tables
from storage.store import open_store


def create_app(settings: Settings) -> FastAPI:
    """Return the service. It closes its connections when the app shuts down.

    Raises:
        DatabaseUnavailableError: the database cannot be opened.
    """
    may_be_called = networks(settings.webhook_networks)
    store = open_store(settings.database_url)
    connections = Connections(
        ConnectionLimits(
            total=settings.connections, per_address=settings.connections_per_address, header_seconds=settings.header_seconds,
            stall_seconds=settings.stall_seconds, proxies=settings.trusted_proxies,
        )
    )  # fmt: skip

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, Any]]:
        deliverer = Deliverer(store, partial(deliver, allowed=may_be_called, secret_of=store.webhooks.signing_secret))
        deliverer.start()
        # Existing objects stay alive: collecting garbage among them would delay requests by tens of milliseconds.
        gc.collect()
        gc.freeze()
        yield {"connections": connections}  # for the server's protocol class
        gc.unfreeze()
        app.state.pools.close()
        app.state.hub.close()
        app.state.logs.close()
        await asyncio.to_thread(deliverer.close)
        store.close()

    for file in ("models", "clusters", "spaces"):
        preset_tables(file)  # cached: else the first submission would hold up the event loop for tens of milliseconds
    app = with_routes(lifespan, settings.require_keys)
    app.state.store, app.state.settings = store, settings
    app.state.keys, app.state.resolver = KeyReader(store), Resolver()
    app.state.jobs, app.state.submissions = (
        RequestBatcher(store.jobs.exact_in_order, 500),  # jobs of one query
        RequestBatcher(store.queue.submit_all, 50),  # submissions of one transaction
    )
    app.state.hub, app.state.logs = EventHub(store), LogHub(store)
    # Close streams at shutdown, not at the end of the lifespan: before that the server waits for every response, and a stream
    # lasts as long as its job.
    connections.on_shutdown = [app.state.hub.close, app.state.logs.close]
    app.state.disk = operations.DiskCheck(store)
    app.state.metrics = Metrics(store, ProcessMetrics(connections, {"events": app.state.hub, "logs": app.state.logs}))
    app.state.limits = OwnerLimits(store, settings.quotas)
    app.state.points, app.state.figures = PointsBoard(store), FigureBoard(store)
    app.state.pools = ThreadPools(
        submitting=ThreadPool("submitted", settings.submissions_at_once),
        computing=ThreadPool("computed", settings.counts_at_once),
        naming=ThreadPool("resolved", settings.names_at_once),
    )
    app.state.known_keys = KnownKeys()
    app.add_middleware(HeadRequests)
    app.add_middleware(RequestGuard, settings=settings, known_keys=app.state.known_keys)
    app.add_middleware(RequestTimer, metrics=app.state.metrics, log=settings.access_log)
    if settings.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=[*settings.trusted_proxies])
    app.add_middleware(ProxyIdentities, settings=settings)
    return app


def with_routes(lifespan: Lifespan[FastAPI] | None = None, asks_for_keys: bool = True) -> FastAPI:
    """The app with its routes and error handlers, without a store."""
    app = DocumentedApp(
        title="autotune",
        version=VERSION,
        description="Submit tuning jobs, follow them, and take the best configuration away.",
        lifespan=lifespan,
        separate_input_output_schemas=False,
        # FastAPI's own spans, except for frequently polled paths. Its metrics and logs are not used.
        telemetry={
            "tracing": are_traced(),
            "operation_spans": False,
            "metrics": False,
            "logs": False,
            "exclude": lambda scope: scope["path"] in ("/livez", "/readyz", "/metrics") or page.is_page(scope["path"]),
        },
        docs_url=None,  # FastAPI's pages load scripts from other hosts; `api.routes.page` has ours
        redoc_url=None,
        redirect_slashes=False,  # a redirect would contain the Host of the request
    )
    app.asks_for_keys = asks_for_keys
    problems.install(app)
    app.router.routes += _api_routes()
    return app


@cache
def _api_routes() -> list[BaseRoute]:
    """The routes in the order in which they are matched, the most frequent first.

    FastAPI builds the handlers of a router when it is first matched, which takes too long for the event loop: they are built
    here, once for all services of a process.
    """
    router = APIRouter(redirect_slashes=False)
    for routes in (jobs, results, figures, logs, operations, catalog, predictions, webhooks, page):
        router.include_router(routes.router)
    nowhere = {"type": "http", "method": "GET", "path": "", "headers": [], "path_params": {}}
    for route in router.routes:
        route.matches(nowhere)
    return router.routes


class HeadRequests:
    """ASGI middleware: a HEAD request gets the status and the headers of the GET request. A stream ends after them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        get_scope = {**scope, "method": "GET"}
        is_answered = False

        async def without_body(message: MutableMapping[str, Any]) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                scope["route"] = get_scope.get("route")  # for the metrics
                await send(message)
            elif not is_answered:
                is_answered = True
                await send({"type": "http.response.body"})
                if message.get("more_body"):
                    answer.cancel()  # a stream would go on as long as its job

        answer = asyncio.ensure_future(self.app(get_scope, receive, without_body))
        try:
            await answer
        except asyncio.CancelledError:
            if not is_answered:
                raise


def make_app() -> FastAPI:
    """Create the service with the settings from the environment."""
    # A computing thread yields this often to the event loop and to reads. With Python's default of 5 ms, each read would wait
    # several times.
    sys.setswitchinterval(0.0005)
    app = create_app(settings_of(os.environ["AUTOTUNE_SERVER"]))  # the settings as JSON
    app.openapi()  # cached now: building it during the first request would delay all others
    return app


def settings_of(text: str) -> Settings:
    """The settings from their JSON text.

    Raises:
        RequestError: a setting is invalid.
    """
    return from_plain(Settings, json.loads(text))
