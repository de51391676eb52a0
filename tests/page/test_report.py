"""A report and a cell of a notebook, opened from the disk without a network."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from autotune.client import Client
from autotune.explain.figures import NAMES
from autotune.notebook import figures
from tests.page.conftest import PATIENCE
from tests.page.place import Place

pytestmark = pytest.mark.prove

ON_A_CANVAS = ("throughput_memory", "best_so_far", "parallel_coordinates", "predicted_measured", "timeline")


@pytest.fixture
def offline(browser: Browser) -> Iterator[Page]:
    """A page without a network, on whose console nothing may be said."""
    context = browser.new_context(offline=True, reduced_motion="reduce", color_scheme="dark")
    page = context.new_page()
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("file:") else faults.append(request.url))
    expect.set_options(timeout=PATIENCE)
    yield page
    context.close()
    assert faults == []


def test_a_report_shows_every_figure(place: Place, finished: str, offline: Page, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with Client(place.url) as client:
        path.write_text(client.report(finished), encoding="utf-8")
    offline.goto(path.as_uri())
    for name in set(NAMES) - {"pipeline_schedule"}:
        figure = offline.locator(f"figure[data-figure={name}]")
        figure.scroll_into_view_if_needed()
        expect(figure.locator("figcaption")).not_to_be_empty()
        if name in ON_A_CANVAS:
            expect(figure.locator("canvas").first).to_be_visible()
        figure.get_by_role("button", name="As table").click()
        expect(figure.locator("tbody tr").first).to_be_visible()
    expect(offline.locator("html")).to_have_attribute("data-theme", "dark")
    offline.locator("figure[data-figure=best_so_far]").get_by_role("button", name="As picture").click()
    chart = offline.locator("figure[data-figure=best_so_far] .canvas")
    chart.press("End")
    expect(offline.locator("figure[data-figure=best_so_far] .readout")).to_contain_text("Trial")
    chart.press("Enter")
    assert "#" not in offline.url, "a report has no page of a trial"


def test_a_cell_of_a_notebook_shows_its_figures(place: Place, finished: str, offline: Page, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    shown = figures(finished, "throughput_memory", "knob_importance", database=f"sqlite:///{place.database}")
    path.write_text(f"<!doctype html><title>cell</title>{shown._repr_html_()}", encoding="utf-8")
    offline.goto(path.as_uri())
    frame = offline.frame_locator("iframe")
    expect(frame.locator("figure[data-figure=throughput_memory] canvas").first).to_be_visible()
    expect(frame.locator("figure[data-figure=knob_importance] .bars")).to_be_visible()
