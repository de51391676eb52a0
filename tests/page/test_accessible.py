"""What axe-core finds on every view, in both themes, on a phone and on a desktop."""

import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.page.conftest import DESKTOP, PHONE, Open
from tests.page.place import Place

pytestmark = pytest.mark.nightly

VIEWS = {
    "jobs": "#/",
    "form": "#/new",
    "job": "#/jobs/{job}",
    "trial": "#/jobs/{job}/trials/0",
    "compare": "#/compare?jobs={job}&trials={job}:1",
    "leaderboard": "#/best",
    "usage": "#/usage",
    "key": "#/key",
    "missing": "#/nowhere",
}


@pytest.mark.parametrize("view", VIEWS)
def test_no_serious_fault(view: str, finished: str, open_page: Open) -> None:
    page = open_page(VIEWS[view].format(job=finished))
    settle(page)
    faults: list[str] = []
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            expect(page.locator("html")).to_have_attribute("data-theme", scheme)
            faults += [f"{viewport['width']} px, {scheme}: {fault}" for fault in serious(page)]
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], "it scrolls sideways"
    assert not faults, "\n".join(faults)


def test_an_empty_and_an_open_form(open_page: Open) -> None:
    page = open_page("#/new")
    page.get_by_text("How it searches, and more").click()
    for button in page.get_by_role("button", name="Add a knob").all():
        button.click()
    settle(page)
    assert not serious(page)


def test_the_theme_is_kept(place: Place, open_page: Open) -> None:
    page = open_page("#/")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.get_by_role("button", name="Use dark colours").click()
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_zoomed_to_the_narrowest(finished: str, open_page: Open) -> None:
    """320 pixels: a desktop's window at 400 %."""
    for path in (f"#/jobs/{finished}", "#/new"):
        page = open_page(path, viewport={"width": 320, "height": 640})
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320


def settle(page: Page) -> None:
    """Wait until what is loaded after the first view is there."""
    page.wait_for_load_state("networkidle")
    for figure in page.locator("figure[data-figure]").all():
        figure.scroll_into_view_if_needed()
        expect(figure.get_by_text(re.compile("^Loading"))).to_have_count(0)
    expect(page.get_by_text(re.compile(r"^(Loading|Asking|Counting|Checking)"))).to_have_count(0)


def serious(page: Page) -> list[str]:
    """The faults that axe-core calls serious or critical, with where they are."""
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    return [
        f"{fault['id']}: {fault['help']}: {'; '.join(node['html'][:160] for node in fault['nodes'][:3])}"
        for fault in found.response["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
