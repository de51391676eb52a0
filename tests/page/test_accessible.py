"""What axe-core finds on every view, in both themes, on a phone and on a desktop."""

import re
import sys
from contextlib import closing
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from benchmarks.prediction import fit_page
from tests.page.conftest import DESKTOP, PHONE, Open
from tests.page.place import Place
from tests.page.test_keys import REFUSED, Guarded, sign_in

pytestmark = pytest.mark.nightly

VIEWS = {
    "jobs": "#/",
    "form": "#/new",
    "job": "#/jobs/{job}",
    "trial": "#/jobs/{job}/trials/0",
    "compare": "#/compare?jobs={job},{other}&trials={job}:1,{job}:2",
    "fit": "#/fit?model=llama-2-7b&cluster=1x4090,2x4GB",
    "leaderboard": "#/best",
    "usage": "#/usage",
    "key": "#/key",
    "missing": "#/nowhere",
}


@pytest.fixture(scope="session")
def other(place: Place) -> str:
    """A job with another question than `finished`."""
    return place.finished(model="llama-mini", trials=3, strategy="random", seed=3, headroom=0.1)


@pytest.mark.parametrize("view", VIEWS)
def test_no_serious_fault(view: str, finished: str, other: str, open_page: Open) -> None:
    page = open_page(VIEWS[view].format(job=finished, other=other))
    settle(page)
    require_accessible(page)


def require_accessible(page: Page) -> None:
    """No serious fault on a desktop and a phone, in light and dark, and nothing that scrolls sideways."""
    faults: list[str] = []
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            expect(page.locator("html")).to_have_attribute("data-theme", scheme)
            faults += [f"{viewport['width']} px, {scheme}: {fault}" for fault in serious(page)]
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], "it scrolls sideways"
    assert not faults, "\n".join(faults)


def test_the_documentation_of_the_api(open_page: Open) -> None:
    page = open_page("docs")
    settle(page)
    assert not serious(page)


def test_the_dialog_of_links(tmp_path: Path, open_page: Open) -> None:
    with closing(Guarded(tmp_path)) as guarded:
        guarded.serve()
        job = guarded.submit(api_key=guarded.anna)
        page = open_page("#/key", at=guarded, expected=REFUSED)
        sign_in(page, guarded.anna)
        expect(page.locator("main h1")).to_have_text("Jobs")
        page.goto(f"/#/jobs/{job}")
        page.get_by_role("button", name="Share").click()
        dialog = page.get_by_role("dialog", name="Share")
        dialog.get_by_role("button", name="Make a link").click()
        expect(dialog.get_by_role("listitem")).to_contain_text("by anna, until")
        require_accessible(page)


def test_other_dialogs(finished: str, open_page: Open) -> None:
    page = open_page(f"#/jobs/{finished}")
    settle(page)
    page.get_by_role("button", name="Labels …").click()
    require_accessible(page)
    page.keyboard.press("Escape")
    page.locator("main h1").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="By keyboard")).to_be_visible()
    require_accessible(page)


def test_the_printed_page(finished: str, open_page: Open) -> None:
    page = open_page(f"#/jobs/{finished}")
    settle(page)
    page.emulate_media(media="print", color_scheme="dark")
    assert not serious(page)


def test_the_page_without_a_server(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fit.html"
    monkeypatch.setattr(sys, "argv", ["fit_page", "--out", str(path), "--small"])
    fit_page.main()
    context = browser.new_context(color_scheme="light")
    page = context.new_page()
    page.goto(path.as_uri())
    page.get_by_label("show every way").check()
    faults: list[str] = []
    for viewport in (DESKTOP, PHONE):
        page.set_viewport_size(viewport)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            faults += [f"{viewport['width']} px, {scheme}: {fault}" for fault in serious(page)]
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], "it scrolls sideways"
    context.close()
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
