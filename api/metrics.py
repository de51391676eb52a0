"""Prometheus metrics: the counts of the database, and the response times of this server."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.connections import Connections, Ended
from api.hub import Hub
from storage.errors import DatabaseUnavailableError
from storage.records import Figures
from storage.store import Store

access = logging.getLogger("autotune.access")


class Metrics:
    """The metrics of one server."""

    def __init__(
        self, store: Store, process: "ProcessMetrics | None" = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = CollectorRegistry()
        self._database = _DatabaseMetrics(store, clock)
        self._registry.register(self._database)
        if process is not None:
            self._registry.register(process)
        self._answers = Histogram(
            "autotune_http_request_seconds",
            "Time to the first byte of an answer.",
            ("method", "route", "status"),
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
            registry=self._registry,
        )

    def text(self, owner: str | None = None) -> str:
        """The metrics in the Prometheus text format. Only the jobs of `owner` are named; None: all jobs."""
        return (generate_latest(self._registry) + generate_latest(_JobMetrics(self._database, owner))).decode()

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a response."""
        self._answers.labels(method, route, str(status)).observe(seconds)


class RequestTimer:
    """ASGI middleware that counts every response, and optionally logs it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: bool) -> None:
        self.app, self._metrics, self._log = app, metrics, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note(scope, message["status"], time.perf_counter() - began)
            await send(message)

        await self.app(scope, receive, timed)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        # Use the route's pattern, not the path: a label per job would be unbounded. Requests without a route share one label.
        route = str(getattr(scope.get("route"), "path", "") or "unknown")
        method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "OTHER"
        self._metrics.note(method, route, status, seconds)
        if self._log:
            about = {"method": method, "path": scope["path"], "status": status, "seconds": round(seconds, 4)}
            access.info("%s %s %d %.1f ms", method, ascii(scope["path"])[1:-1], status, 1000 * seconds, extra=about)


class ProcessMetrics(Collector):
    """Metrics of this process: open connections and streams, and their failures."""

    def __init__(self, connections: Connections, hubs: Mapping[str, Hub[Any]]) -> None:
        self._connections, self._hubs = connections, hubs

    def describe(self) -> Iterable[Metric]:
        """Empty: the names are those of `collect`."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The metrics of the process."""
        ended = CounterMetricFamily(
            "autotune_connections_ended", "Connections that this server ended, by reason.", labels=("reason",)
        )
        for reason in Ended:
            ended.add_metric((reason.value,), self._connections.ended[reason])
        streams = GaugeMetricFamily("autotune_streams", "Streams that are open.", labels=("kind",))
        failed = CounterMetricFamily(
            "autotune_stream_failures", "Looks at the database for streams that failed.", labels=("kind",)
        )
        for kind, hub in self._hubs.items():
            streams.add_metric((kind,), hub.streams)
            failed.add_metric((kind,), hub.failed)
        count = self._connections.count
        return GaugeMetricFamily("autotune_connections", "Open connections of this server.", count), ended, streams, failed


class _DatabaseMetrics(Collector):
    """Metrics of the database, read at each scrape."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._kept: tuple[float, Figures, int] | None = None

    def describe(self) -> Iterable[Metric]:
        """Empty: otherwise the registration would read the database."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The metrics of the database."""
        up = GaugeMetricFamily("autotune_database_up", "Whether the database can be used.", 1)
        try:
            figures, workers = self.figures()
        except DatabaseUnavailableError:
            return (GaugeMetricFamily(up.name, up.documentation, 0),)
        jobs = GaugeMetricFamily("autotune_jobs", "Jobs by state.", labels=("state",))
        for state, count in sorted(figures.jobs.items()):
            jobs.add_metric((state,), count)
        trials = CounterMetricFamily("autotune_trials", "Trials with an outcome.", labels=("outcome",))
        for outcome, count in sorted(figures.trials.items()):
            trials.add_metric((outcome,), count)
        seconds = HistogramMetricFamily("autotune_trial_seconds", "Time that trials took.", labels=("outcome",))
        for outcome, histogram in sorted(figures.durations.items()):
            buckets = [(f"{step:g}", float(count)) for step, count in histogram.within.items()]
            seconds.add_metric((outcome,), [*buckets, ("+Inf", float(histogram.count))], histogram.seconds)
        wait = GaugeMetricFamily("autotune_queue_seconds", "Age of the job that waits longest.", figures.longest_wait)
        alive = GaugeMetricFamily("autotune_workers", "Workers that gave a sign of life within a minute.", workers)
        return up, jobs, trials, seconds, wait, alive

    def figures(self) -> tuple[Figures, int]:
        """The database's counts and the number of workers, read at most once in `KEPT_SECONDS`."""
        with self._lock:
            # How long the database's figures are cached, so that several scrapes cost one query.
            if self._kept is None or self._clock() - self._kept[0] > 5.0:
                self._kept = (self._clock(), self._store.overviews.figures(), len(self._store.workers.alive()))
            return self._kept[1], self._kept[2]


class _JobMetrics(CollectorRegistry):
    """The results of running jobs by id, for one owner or for all."""

    def __init__(self, database: _DatabaseMetrics, owner: str | None) -> None:
        super().__init__()
        self._database, self._owner = database, owner

    def collect(self) -> Iterator[Metric]:
        """One metric; none if the database is unavailable."""
        best = GaugeMetricFamily(
            "autotune_job_best_samples_per_second", "Samples/s of a running job's answer so far.", labels=("job",)
        )
        try:
            figures, _ = self._database.figures()
        except DatabaseUnavailableError:
            return
        for job_id, rate in figures.best.items():
            if self._owner in (None, rate.submitter):
                best.add_metric((job_id,), rate.samples_per_second)
        yield best
