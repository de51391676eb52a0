"""A browser that looks at a service; whatever its console says of errors fails the test."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, expect, sync_playwright

from tests.page.place import Place

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60_000
"""Milliseconds that an expectation waits: the machine may be busy."""
BUSY = "503 (Service Unavailable"
"""What a service answers that has too much to compute; the page asks again."""
DESKTOP, PHONE = ViewportSize(width=1280, height=900), ViewportSize(width=360, height=780)


def served(folder: Path) -> Iterator[Place]:
    """A service with a worker."""
    with closing(Place(folder)) as place:
        place.serve()
        place.work()
        yield place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A service with a worker, for all tests that leave it as it is."""
    yield from served(tmp_path_factory.mktemp("page"))


EVERY_OUTCOME = {"trials": 24, "strategy": "grid", "memory_limit": 20 * 2**20}
"""What a job asks for that has every outcome among its trials."""


@pytest.fixture(scope="session")
def finished(place: Place) -> str:
    """A job that has ended, with every outcome among its trials."""
    return place.finished(**EVERY_OUTCOME)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium. Of a module: where Playwright runs, nothing else of the same thread can use asyncio."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)} is on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """What went wrong on a page."""

    def __init__(self, page: Page, own: str, expected: Sequence[str]) -> None:
        self.faults: list[str] = []
        self._own, self._expected = own, (BUSY, *expected)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self._fault(f"uncaught: {error}"))
        page.on("dialog", lambda dialog: self._fault(f"a dialog: {dialog.message}"))
        page.on("request", lambda request: self._asked(request.url))

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self._fault(f"{message.type}: {message.text}")

    def _asked(self, url: str) -> None:
        if not url.startswith((self._own, "data:", "blob:")):
            self._fault(f"asked another server: {url}")

    def _fault(self, told: str) -> None:
        if not any(part in told for part in self._expected):
            self.faults.append(told)


Open = Callable[..., Page]


@pytest.fixture
def watched(place: Place, browser: Browser) -> Iterator[dict[Page, Watched]]:
    """Every page of the test with what went wrong on it."""
    pages: dict[Page, Watched] = {}
    yield pages
    faults = [fault for watched in pages.values() for fault in watched.faults]
    for page in pages:
        page.context.close()
    assert not faults, "\n".join(faults)


@pytest.fixture
def open_page(place: Place, browser: Browser, watched: dict[Page, Watched], tmp_path: Path) -> Open:
    """Opens a view in a window of its own.

    `expected`: what the console may say. The browser itself tells there of every refusal, and of a server that is gone.
    """
    expect.set_options(timeout=PATIENCE)

    def opened(path: str = "", at: Place | None = None, viewport: ViewportSize = DESKTOP, expected: Sequence[str] = ()) -> Page:
        where = (at or place).url
        context = browser.new_context(
            viewport=viewport, color_scheme="light", reduced_motion="reduce", accept_downloads=True, base_url=where
        )  # fmt: skip
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        watched[page] = Watched(page, where, expected)
        page.goto(f"/{path}")
        expect(page.locator("main h1").first).to_be_visible()
        return page

    return opened
