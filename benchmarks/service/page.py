"""The web page with a job of very many trials: load time, responsiveness, memory, cost of each event.

    python -m benchmarks.service.page [--trials 10000] [--runs 5] [--markdown docs/results/page-performance.md]
    python -m benchmarks.service.page --trials 100000 --runs 3 --markdown docs/results/page-performance-100000.md

The bounds of memory, inputs and answers are for 10,000 trials; with more, these are figures without a bound.
`autotune serve`, a headless Chromium and the writer of the trials share this machine's cores. Needs the development tools and
Chromium.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Browser, CDPSession, Page, Request, sync_playwright

from benchmarks.service.page_rows import Live, write_job
from benchmarks.service.place import service
from benchmarks.service.report import Claim, Report, milliseconds

PAINT_SECONDS, MEMORY_BYTES, INTERACTION_SECONDS, EVENT_BYTES = 1.5, 300e6, 0.2, 4096
WATCH = Path(__file__).with_name("page_watch.js").read_text()
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
POINTS_SECONDS, NEWS_SECONDS, REPEATS = 0.5, 0.02, 9
BOUNDED_TRIALS = 10_000
"""The most trials of a job for which the bounds of memory, inputs and answers hold."""
SCROLLED, SCROLL_SECONDS = "scrolling the table", 0.1
PATIENCE_SECONDS = 60.0
RESULTS, EVENTS_EACH, PAUSE = 40, 3, 0.1
"""Results that arrive while the page is watched, events of each, seconds between two results."""
WINDOW = {"width": 1440, "height": 900}


@dataclass(slots=True)
class Run:
    """Figures of one visit, in seconds and bytes."""

    paint: float = 0.0
    drawn: float = 0.0
    longest_load: float = 0.0
    heap: float = 0.0
    resident: float = 0.0
    moves: dict[str, "Move"] = field(default_factory=dict)
    event_bytes: float = 0.0
    whole_reloads: int = 0
    live: "Move | None" = None


@dataclass(frozen=True, slots=True)
class Move:
    """Responsiveness of the page during an interaction."""

    frames: list[float]
    """Seconds between two frames."""
    longest_task: float
    slowest: float
    """Longest time from an input to the frame that shows its effect; 0: all took less than a frame."""

    @property
    def longest_frame(self) -> float:
        """Seconds; no input waits longer for the frame that shows its effect."""
        return max(self.frames)

    @property
    def text(self) -> str:
        ordered = sorted(self.frames)
        p95 = ordered[int(0.95 * (len(ordered) - 1))]
        frames = f"frames {milliseconds(statistics.median(ordered))} (95 % within {milliseconds(p95)})"
        return f"{frames}, longest task {milliseconds(self.longest_task)}"


class Visitor:
    """A new browser window on the page, without a cache."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._context = browser.new_context(viewport=WINDOW)
        self.page: Page = self._context.new_page()
        self.page.add_init_script(WATCH)
        self.page.set_default_timeout(60_000)
        self.protocol: CDPSession = self._context.new_cdp_session(self.page)
        self.browser_protocol = browser.new_browser_cdp_session()
        self._url = url
        self._pending: list[str] = []
        self.page.on("request", self._on_request)
        self.page.on("requestfinished", self._on_finished)
        self.page.on("requestfailed", self._on_finished)

    def _on_request(self, request: Request) -> None:
        if "/events/stream" not in request.url:
            self._pending.append(request.url)

    def _on_finished(self, request: Request) -> None:
        if request.url in self._pending:
            self._pending.remove(request.url)

    def open(self, job: str) -> Run:
        page = self.page
        page.goto(f"{self._url}/#/jobs/{job}")
        drawn, limit = 0.0, time.monotonic() + PATIENCE_SECONDS
        while not drawn:  # the page's content security policy forbids Playwright's own waiting
            if time.monotonic() > limit:
                raise SystemExit(f"the plot is not drawn after {PATIENCE_SECONDS:.0f} s")
            page.wait_for_timeout(100)
            # It is drawn when it is near.
            page.evaluate("document.querySelector('[data-figure=throughput_memory]')?.scrollIntoView()")
            drawn = page.evaluate("watch.drawn('throughput_memory')")
        tasks = page.evaluate("watch.seen().tasks")
        return Run(
            paint=page.evaluate("watch.paint()") / 1000, drawn=drawn / 1000,
            longest_load=max((duration for _, duration in tasks), default=0.0) / 1000,
        )  # fmt: skip

    def settle(self) -> None:
        """Wait until every request except event streams is answered."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while self._pending:
            if time.monotonic() > limit:
                raise SystemExit(f"requests are not answered after {PATIENCE_SECONDS:.0f} s: {', '.join(self._pending)}")
            self.page.wait_for_timeout(500)

    def during(self, do: Callable[[], object]) -> Move:
        """Measure responsiveness during `do`, and for half a second after."""
        self.page.evaluate("watch.begin()")
        do()
        self.page.wait_for_timeout(500)
        seen: dict[str, Any] = self.page.evaluate("watch.seen()")
        return Move(
            frames=[value / 1000 for value in seen["frames"]],
            longest_task=max((duration for _, duration in seen["tasks"]), default=0.0) / 1000,
            slowest=max(seen["events"], default=0.0) / 1000,
        )

    def memory(self) -> tuple[float, float]:
        """Bytes of the JavaScript heap after a collection, and of the renderer's private memory."""
        self.protocol.send("HeapProfiler.collectGarbage")
        heap = self.protocol.send("Runtime.getHeapUsage")["usedSize"]
        processes = self.browser_protocol.send("SystemInfo.getProcessInfo")["processInfo"]
        renderers = [process["id"] for process in processes if process["type"] == "renderer"]
        return heap, max(psutil.Process(pid).memory_full_info().uss for pid in renderers)

    def close(self) -> None:
        self._context.close()


def interactions(page: Page) -> dict[str, Callable[[], object]]:
    """User interactions: name -> function."""
    table = page.get_by_role("region", name="Trials of this job")

    def wheel() -> None:
        table.hover()
        for _ in range(40):
            page.mouse.wheel(0, 400)
            page.wait_for_timeout(16)

    def hover() -> None:
        box = page.locator("[data-figure=throughput_memory] canvas").first.bounding_box() or {
            "x": 0,
            "y": 0,
            "width": 1,
            "height": 1,
        }
        for step in range(60):
            page.mouse.move(
                box["x"] + box["width"] * (0.1 + 0.8 * step / 60), box["y"] + box["height"] * (0.3 + 0.4 * (step % 7) / 7)
            )

    def brush() -> None:
        page.locator("[data-figure=parallel_coordinates]").scroll_into_view_if_needed()
        canvas = page.locator("[data-figure=parallel_coordinates] canvas").first
        canvas.wait_for()  # it is drawn when it becomes visible
        page.wait_for_timeout(1500)
        box = canvas.bounding_box() or {"x": 0, "y": 0, "width": 1, "height": 1}
        x, y = box["x"] + 60, box["y"]
        page.mouse.move(x, y + 0.3 * box["height"])
        page.mouse.down()
        page.mouse.move(x, y + 0.6 * box["height"], steps=10)
        page.mouse.up()

    return {
        "typing into the filter": lambda: page.get_by_label("Text").press_sequentially("zero_stage=2", delay=60),
        "choosing an outcome": lambda: page.get_by_label("Outcome").select_option("OK"),
        "sorting the table": lambda: table.get_by_role("button", name="Estimate").click(),
        SCROLLED: wheel,
        "moving over the plot": hover,
        "brushing an axis": brush,
        "scrolling the page": lambda: [(page.mouse.wheel(0, -300), page.wait_for_timeout(16)) for _ in range(40)],
    }


def visit(browser: Browser, url: str, job: str, live: Live) -> Run:
    """One visit: load the page, run the interactions, watch results arrive."""
    visitor = Visitor(browser, url)
    try:
        run = visitor.open(job)
        run.moves = {name: visitor.during(do) for name, do in interactions(visitor.page).items()}
        watch_events(visitor, run, live)
        run.heap, run.resident = visitor.memory()
    finally:
        visitor.close()
    return run


def watch_events(visitor: Visitor, run: Run, live: Live) -> None:
    """Record the bytes received for each event, counted by the browser."""
    received, wholes = 0.0, 0

    def count(event: dict[str, Any]) -> None:
        nonlocal received
        received += event.get("encodedDataLength") or event.get("dataLength", 0)

    def count_reload(event: dict[str, Any]) -> None:
        nonlocal wholes
        wholes += event["request"]["url"].endswith(("/points", "/points?since=0")) or "/trials?" in event["request"]["url"]

    visitor.settle()  # figures that became visible are read once in any case
    visitor.protocol.send("Network.enable")
    visitor.protocol.on("Network.dataReceived", count)
    visitor.protocol.on("Network.requestWillBeSent", count_reload)

    def results() -> None:
        for _ in range(RESULTS):
            live.one()
            visitor.page.wait_for_timeout(1000 * PAUSE)
        visitor.page.wait_for_timeout(2000)

    run.live = visitor.during(results)
    run.event_bytes, run.whole_reloads = received / (RESULTS * EVENTS_EACH), wholes


@dataclass(frozen=True, slots=True)
class Answers:
    """Seconds of the requests behind the plots."""

    first: float
    """Seconds for every trial of a job that the service has not read yet."""
    whole: list[float]
    increments: list[float]


def ask_for_points(url: str, job: str) -> Answers:
    """Time the page's requests without the page."""
    path = f"{url}/v1/jobs/{job}/points"
    first, answer = _timed(path)
    version = json.loads(answer)["version"]
    return Answers(
        first, [_timed(path)[0] for _ in range(REPEATS)], [_timed(f"{path}?since={version - 3}")[0] for _ in range(REPEATS)]
    )  # fmt: skip


def _timed(url: str) -> tuple[float, bytes]:
    began = time.perf_counter()
    with urllib.request.urlopen(url, timeout=60) as answer:
        body = answer.read()
    return time.perf_counter() - began, body


def report_answers(report: Report, answers: Answers, trials: int) -> None:
    whole, increment = statistics.median(answers.whole), statistics.median(answers.increments)
    for name, value, bound in (
        ("every trial as columns, from the service", whole, POINTS_SECONDS),
        ("changes by one result", increment, NEWS_SECONDS),
    ):
        report_bounded(report, trials, Claim(name, f"under {milliseconds(bound)}", milliseconds(value), value < bound))
    report.note(f"Every trial as columns, when the service reads the job for the first time: {seconds_text(answers.first)}.")


def report_bounded(report: Report, trials: int, claim: Claim) -> None:
    """A claim, or a note where the job has more trials than the bound is for."""
    if trials <= BOUNDED_TRIALS:
        report.claim(claim)
    else:
        report.note(f"{claim.name.capitalize()}: {claim.measured} ({claim.target} is the bound for {BOUNDED_TRIALS:,} trials).")


def report_on(runs: list[Run], trials: int) -> Report:
    """Medians of the runs, and whether the bounds hold."""
    report = Report()

    def median_of(value: Callable[[Run], float]) -> float:
        return statistics.median(value(run) for run in runs)

    def each(value: Callable[[Run], float], shown: Callable[[float], str]) -> str:
        return f"median {shown(median_of(value))} of {', '.join(shown(value(run)) for run in runs)}"

    paint, resident = median_of(lambda run: run.paint), median_of(lambda run: run.resident)
    report.claim(
        Claim("first paint", f"under {PAINT_SECONDS} s", each(lambda run: run.paint, seconds_text), paint < PAINT_SECONDS)
    )
    frames = [run.moves[SCROLLED].longest_frame for run in runs]
    report.claim(
        Claim(
            "longest frame while the table scrolls", f"under {milliseconds(SCROLL_SECONDS)}",
            f"longest of all {milliseconds(max(frames))}", max(frames) < SCROLL_SECONDS,
        )
    )  # fmt: skip
    cost, wholes = median_of(lambda run: run.event_bytes), sum(run.whole_reloads for run in runs)
    report.claim(
        Claim(
            "cost of an event", f"under {EVENT_BYTES / 1024:.0f} KiB, no reload of all trials",
            f"{cost / 1024:.2f} KiB, {wholes} reloads in {len(runs) * RESULTS * EVENTS_EACH} events",
            cost < EVENT_BYTES and not wholes,
        )
    )  # fmt: skip
    report_bounded(
        report, trials,
        Claim(
            "memory of the renderer", f"under {megabytes(MEMORY_BYTES)}",
            each(lambda run: run.resident, megabytes), resident < MEMORY_BYTES,
        ),
    )  # fmt: skip
    slowest = median_of(lambda run: max(move.slowest for move in run.moves.values()))
    named = max(runs[0].moves, key=lambda name: statistics.median(run.moves[name].slowest for run in runs))
    report_bounded(
        report, trials,
        Claim(
            "slowest answer to an input", f"under {milliseconds(INTERACTION_SECONDS)}",
            f"median {milliseconds(slowest)} ({named})", slowest < INTERACTION_SECONDS,
        ),
    )  # fmt: skip
    report.note(f"Every point drawn, and the page idle: {each(lambda run: run.drawn, seconds_text)}.")
    report.note(f"Longest task of the main thread until then: {each(lambda run: run.longest_load, milliseconds)}.")
    report.note(f"JavaScript heap after a collection: {each(lambda run: run.heap, megabytes)}.")
    for name in runs[0].moves:
        report.note(f"{name.capitalize()}: {_moves([run.moves[name] for run in runs])}.")
    report.note(f"While {1 / PAUSE:.0f} results a second arrive: {_moves([run.live for run in runs if run.live])}.")
    return report


def _moves(moves: list[Move]) -> str:
    return Move(
        frames=[frame for move in moves for frame in move.frames],
        longest_task=statistics.median(move.longest_task for move in moves),
        slowest=statistics.median(move.slowest for move in moves),
    ).text


def seconds_text(value: float) -> str:
    return f"{value:.2f} s"


def megabytes(value: float) -> str:
    return f"{value / 1e6:.0f} MB"


@contextmanager
def chromium() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--enable-precise-memory-info"])
        yield browser
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        database = f"sqlite:///{folder}/jobs.db"
        job, configs = write_job(database, arguments.trials)
        live = Live(database, job, configs)
        with service(database, keys=False) as place, chromium() as browser:
            url = f"http://127.0.0.1:{place.port}"
            answers = ask_for_points(url, job)
            visit(browser, url, job, live)  # warms the caches of browser and service
            runs = [visit(browser, url, job, live) for _ in range(arguments.runs)]
        live.close()
    report = report_on(runs, arguments.trials)
    report_answers(report, answers, arguments.trials)
    method = (
        f"Written by `python -m benchmarks.service.page --trials {arguments.trials} --runs {arguments.runs}`, in "
        f"{time.monotonic() - began:.0f} s: {arguments.runs} visits with an empty cache, headless "
        f"Chromium, {WINDOW['width']} x {WINDOW['height']} pixels, software rendering, on {os.cpu_count()} cores shared by "
        "browser, service and the writer of the trials."
    )
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(f"The page with {arguments.trials:,} trials in a job", [method]))
    return 0 if report.good else 1


if __name__ == "__main__":
    raise SystemExit(main())
