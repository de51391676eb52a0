"""One job: watched live, filtered, compared, taken away, cancelled; and while the server is gone."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, Route, ViewportSize, expect

from tests.page.conftest import DESKTOP, PHONE, Open
from tests.page.place import BEFORE, BROKEN, MANY_CHANGES, Place


@pytest.fixture
def own_place(tmp_path: Path) -> Iterator[Place]:
    """A service that the test may end, with a slow worker."""
    with closing(Place(tmp_path)) as place:
        place.serve()
        place.work(seconds_per_trial=0.5)
        yield place


@pytest.mark.prove
def test_trials_are_filtered_and_sorted(finished: str, open_page: Open) -> None:
    page = open_page(f"#/jobs/{finished}")
    table = page.get_by_role("region", name="Trials of this job")
    rows = table.locator("tbody tr:not(.gap)")
    expect(rows).not_to_have_count(0)
    page.get_by_label("Outcome").select_option("INFEASIBLE")
    expect(rows).to_have_count(2)
    expect(table).to_contain_text("Does not fit")
    page.get_by_label("Outcome").select_option("OK")
    table.get_by_role("button", name="Estimate").click()
    expect(rows.first).to_have_class(re.compile("best"))
    page.get_by_label("Text").fill("zero_stage=3")
    expect(rows.locator("td:nth-child(10)").filter(has_not_text="3")).to_have_count(0)
    expect(rows).not_to_have_count(0)


@pytest.mark.prove
def test_a_job_shows_what_it_is_called(place: Place, open_page: Open) -> None:
    job = place.submit(trials=2, name="nightly", tags=["smoke"], note="after the upgrade")
    page = open_page(f"#/jobs/{job}")
    expect(page.locator("main h1")).to_contain_text("nightly")
    expect(page.get_by_text("smoke", exact=True)).to_be_visible()
    expect(page.get_by_text("after the upgrade")).to_be_visible()
    page.goto("/#/?text=smoke")
    row = page.get_by_role("listitem").filter(has_text=job)
    expect(row.get_by_role("link", name="nightly")).to_be_visible()
    expect(row).to_contain_text("smoke")


@pytest.mark.prove
def test_a_job_for_goodput_shows_how_to_run_its_answer(place: Place, open_page: Open) -> None:
    job = place.finished(trials=2, objective="goodput", goodput=["failures=rsc1", "tokens=1e10"])
    page = open_page(f"#/jobs/{job}")
    figure = page.locator(".figure").filter(has_text="Kept on nodes that fail")
    expect(figure).to_contain_text(re.compile(r"\d+(\.\d+)? ?%"))
    expect(figure).to_contain_text(re.compile(r"checkpoint every \d[\d,]* steps?, \d+ spare nodes?"))
    expect(figure).to_contain_text(re.compile(r"ends after [\d.]+ days \([\d.]+ to [\d.]+\)"))


@pytest.mark.prove
def test_chosen_trials_stand_beside_each_other(finished: str, open_page: Open) -> None:
    page = open_page(f"#/jobs/{finished}")
    for number in (0, 2):
        page.get_by_label(f"Compare trial {number}", exact=True).check()
    page.get_by_role("link", name="Compare 2").click()
    table = page.get_by_role("region", name="Trials beside each other")
    expect(table.locator("thead th")).to_have_count(2)
    expect(table.locator("tr.differs").first).to_contain_text("(differs)")
    assert {row.split("(")[0].strip() for row in table.locator("tr.differs th").all_inner_texts()} <= {
        "zero_stage",
        "micro_batch_size",
    }
    expect(table.get_by_role("row", name=re.compile("where the memory goes"))).to_contain_text("parameters")
    expect(table.get_by_role("row", name=re.compile("where a step goes"))).to_contain_text("compute")
    page.get_by_role("button", name=re.compile("Remove")).first.click()
    expect(table.locator("thead th")).to_have_count(1)
    expect(page).to_have_url(re.compile(f"trials={finished}(:|%3A)2$"))


@pytest.mark.nightly
def test_jobs_stand_beside_each_other(place: Place, finished: str, open_page: Open) -> None:
    other = place.finished(trials=4, seed=7)
    page = open_page("#/compare")
    for job in (finished, other):
        page.get_by_role("checkbox", name=re.compile(job)).check()
    table = page.get_by_role("region", name="Jobs beside each other")
    expect(table.get_by_role("row", name=re.compile(r"^trials \(differs\) 24 4"))).to_be_visible()
    page.locator("[data-figure=compared_throughput_memory]").scroll_into_view_if_needed()
    expect(page.locator("[data-figure=compared_throughput_memory] canvas")).to_be_visible()
    page.locator("[data-figure=compared_best_so_far]").get_by_role("button", name="As table").click()
    expect(page.locator("[data-figure=compared_best_so_far] table")).to_have_count(2)


@pytest.mark.prove(every=2)
@pytest.mark.parametrize(("viewport", "most"), [(DESKTOP, 900), (PHONE, 1600)])
def test_the_answer_comes_first(finished: str, open_page: Open, viewport: ViewportSize, most: int) -> None:
    knobs = knobs_of_the_answer(open_page(f"#/jobs/{finished}", viewport=viewport), most)
    assert "zero_stage" in knobs or "micro_batch_size" in knobs


@pytest.mark.prove
def test_so_does_one_with_long_names_and_many_knobs(tmp_path: Path, open_page: Open) -> None:
    with closing(Place(tmp_path)) as place:
        place.serve()
        place.work(submitted=(MANY_CHANGES, MANY_CHANGES | {"pins": BEFORE}))
        job = place.finished(**MANY_CHANGES, baseline=BEFORE)
        for viewport, most in ((DESKTOP, 900), (PHONE, 1600)):
            page = open_page(f"#/jobs/{job}", at=place, viewport=viewport)
            assert {*knobs_of_the_answer(page, most)} == BEFORE.keys()
            assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def knobs_of_the_answer(page: Page, most: int) -> list[str]:
    """The knobs to change. They and their export are within `most` pixels: the first screen of a desktop, the second of a
    phone."""
    answer = page.get_by_role("region", name="Change this")
    expect(answer).to_contain_text(re.compile(r"samples/s, [\d.]+x \[.*\] the baseline; the best with a probability"))
    for part in (answer.get_by_role("table"), answer.get_by_role("button", name="Download")):
        box = part.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= most
    return answer.get_by_role("rowheader").all_inner_texts()


@pytest.mark.prove
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_answer_is_one_sheet_of_paper(finished: str, open_page: Open, scheme: Literal["light", "dark"]) -> None:
    page = open_page(f"#/jobs/{finished}")
    page.emulate_media(color_scheme=scheme)
    expect(page.get_by_role("region", name="Change this")).to_be_visible()
    page.locator("[data-figure=throughput_memory] canvas").wait_for()
    assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(prefer_css_page_size=True))) == 1
    page.emulate_media(media="print")
    for shown in ("Knobs to change", "What was asked for"):
        expect(page.get_by_role("region", name=shown)).to_be_visible()
    for hidden in ("Main", "What was measured", "Trials of this job"):
        expect(page.get_by_label(hidden)).to_be_hidden()
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--surface').trim()") == "#ffffff"


@pytest.mark.prove
def test_exports_are_downloaded_and_say_what_they_lack(finished: str, open_page: Open) -> None:
    page = open_page(f"#/jobs/{finished}")
    exports = page.get_by_role("region", name="Take it away")
    exports.get_by_text("What is in it").click()
    exports.get_by_label("Format").select_option("deepspeed")
    expect(exports).to_contain_text("zero_optimization")
    expect(exports.get_by_role("list")).to_contain_text("native-only")
    with page.expect_download() as found:
        exports.get_by_role("button", name="Download").click()
    assert found.value.suggested_filename == "ds_config.json"
    assert json.loads(Path(found.value.path()).read_text())["train_batch_size"] == 8
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    exports.get_by_label("Format").select_option("json")
    expect(exports).to_contain_text("schema_version")
    exports.get_by_role("button", name="Copy").click()
    expect(page.get_by_text("Copied.")).to_be_attached()
    assert json.loads(page.evaluate("navigator.clipboard.readText()"))["job"]["id"] == finished


@pytest.mark.prove
def test_a_trial_that_failed_says_why(finished: str, open_page: Open) -> None:
    page = open_page(f"#/jobs/{finished}")
    page.get_by_label("Outcome").select_option("FAILED")
    page.get_by_role("region", name="Trials of this job").get_by_role("link").first.click()
    expect(page.locator("main h1")).to_contain_text("Trial")
    expect(page.get_by_text(BROKEN).first).to_be_visible()


@pytest.mark.prove
def test_every_figure_is_also_a_table(finished: str, open_page: Open) -> None:
    page = open_page(f"#/jobs/{finished}")
    for figure in page.locator("figure[data-figure]").all():
        figure.scroll_into_view_if_needed()
        button = figure.get_by_role("button", name="As table")
        expect(button.or_(figure.locator("figcaption")).first).to_be_visible()
        if button.count():
            button.click()
            expect(figure.locator("table").first).to_be_visible()


@pytest.mark.prove
def test_a_running_job_is_cancelled(own_place: Place, open_page: Open) -> None:
    job = own_place.submit(trials=24, strategy="grid")
    page = open_page(f"#/jobs/{job}", at=own_place)
    expect(page.get_by_text("Running").first).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("The job was cancelled.")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)


@pytest.mark.nightly
def test_the_page_goes_on_when_the_server_comes_back(own_place: Place, open_page: Open) -> None:
    job = own_place.submit(trials=12, strategy="grid")
    page = open_page(f"#/jobs/{job}", at=own_place, expected=("net::ERR_",))
    page.evaluate("window.loadedOnce = true")
    expect(page.get_by_text(re.compile(r"[1-9] of 12 trials"))).to_be_visible()
    own_place.kill()
    expect(page.get_by_text("What you see may be old")).to_be_visible()
    own_place.serve()
    expect(page.get_by_text("What you see may be old")).to_have_count(0, timeout=30_000)
    expect(page.get_by_text("Succeeded").first).to_be_visible(timeout=30_000)
    expect(page.get_by_text("12 of 12 trials", exact=True)).to_be_visible()
    assert page.evaluate("window.loadedOnce"), "it was loaded anew"


@pytest.mark.nightly
def test_figures_are_drawn_when_their_code_comes_late(finished: str, open_page: Open) -> None:
    """As where the server is gone just when it is asked for."""
    page = open_page("#/jobs", expected=("net::ERR_",))
    asked: list[str] = []

    def refuse_first(route: Route) -> None:
        asked.append(route.request.url)
        route.abort() if len(asked) == 1 else route.continue_()

    page.route("**/vendor/echarts.mjs*", refuse_first)
    page.goto(f"/#/jobs/{finished}")
    figure = page.locator("figure[data-figure]").first
    figure.scroll_into_view_if_needed()
    expect(figure.locator("canvas").first).to_be_visible()
    assert len(asked) >= 2


@pytest.mark.nightly
def test_a_real_sweep(place: Place, open_page: Open) -> None:
    place.work_for_real()
    job = place.submit(
        runner="local",
        ranks=1,
        trials=1,
        sequence_length=32,
        confirm_repeats=0,
        control_every=0,
        pins={"micro_batch_size": 1, "activation_checkpointing": "none"},
    )
    page = open_page(f"#/jobs/{job}")
    expect(page.get_by_text("Succeeded").first).to_be_visible(timeout=180_000)
    page.get_by_role("region", name="Trials of this job").get_by_role("link", name="0", exact=True).click()
    expect(page.locator("main")).to_contain_text("parameters")


@pytest.mark.prove
def test_the_list_of_keys_is_opened_and_closed_by_keyboard(place: Place, open_page: Open) -> None:
    page = open_page("#/")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="By keyboard")
    expect(dialog).to_be_in_viewport(ratio=1)
    assert dialog.evaluate("element => element.scrollHeight <= element.clientHeight")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("/")
    expect(page.get_by_label("Text")).to_be_focused()
