"""What a team shares: the best of all jobs, labels, addresses of filtered trials, effects of knobs, notifications, keys."""

import re

import pytest
from playwright.sync_api import expect

from autotune.client import Client
from storage.store import open_store
from tests.page.conftest import Open
from tests.page.place import SUBMITTED, Place

pytestmark = pytest.mark.nightly

RECORDED = """() => {
window.shown = [];
window.Notification = class {
  constructor(title, options) { window.shown.push([title, options.tag]); }
  static async requestPermission() { return window.permission ?? "granted"; }
};
}"""


def test_the_best_of_all_jobs(place: Place, finished: str, open_page: Open) -> None:
    place.finished(trials=2, seed=5, name="shorter", sequence_length=32)
    page = open_page("#/best")
    table = page.get_by_role("region", name="The fastest answers")
    lengths = [item["sequence_length"] for item in page.request.get(f"{place.url}/v1/leaderboard").json()["items"]]
    assert {32, 64} <= {*lengths}
    expect(table.locator("tbody tr")).to_have_count(len(lengths))
    with Client(place.url) as client:
        answer = client.job(finished).answer
    assert answer is not None
    row = table.get_by_role("row").filter(has=page.locator(f'a[href="#/jobs/{finished}/trials/{answer.trial}"]'))
    expect(row).to_contain_text("llama-tiny")
    page.get_by_label("Model").select_option("llama-tiny")
    expect(page).to_have_url(re.compile(r"#/best\?model=llama-tiny$"))
    table.get_by_role("button", name="Length").click()
    expect(table.locator("tbody tr").first).to_contain_text(str(max(lengths)))


def test_the_service_looks_for_words_in_jobs_that_the_page_has_not_read(place: Place, finished: str, open_page: Open) -> None:
    with open_store(place.database) as store:
        newer = [store.jobs.create(SUBMITTED | {"name": f"run {number}", "trials": 1}).id for number in range(60)]
    try:
        page = open_page()
        rows = page.get_by_role("list", name="Jobs, newest first").get_by_role("listitem")
        expect(rows).to_have_count(50)
        page.get_by_label(f"Compare llama-tiny {newer[-1]}").check()
        page.get_by_label("Text").fill(f"SUCCEEDED {finished}")
        expect(rows).to_have_count(1)
        expect(rows.first).to_contain_text(finished)
        expect(page).to_have_url(re.compile("text=SUCCEEDED"))
        page.get_by_label(f"Compare llama-tiny {finished}").check()
        expect(page.get_by_role("link", name="Compare 2 jobs")).to_be_visible()
        page.get_by_label("Text").fill("no such <b>job</b>")
        expect(page.get_by_text("No job has all of these words: no such <b>job</b>")).to_be_visible()
    finally:
        with open_store(place.database) as store:
            for job in newer:
                store.jobs.delete(job)


def test_labels_are_changed(place: Place, open_page: Open) -> None:
    job = place.finished(trials=1)
    page = open_page(f"#/jobs/{job}", expected=["422"])
    page.get_by_role("button", name="Labels …").click()
    dialog = page.get_by_role("dialog", name="Labels")
    dialog.get_by_label("Name").fill("after <b>the</b> upgrade")
    dialog.get_by_label("Tags").fill("not/allowed?")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("tags")
    dialog.get_by_label("Tags").fill("h100, nightly")
    dialog.get_by_label("Note").fill("compare with May")
    dialog.get_by_role("button", name="Save").click()
    expect(page.locator("main h1")).to_have_text("after <b>the</b> upgrade")
    expect(page.get_by_text("compare with May")).to_be_visible()
    with Client(place.url) as client:
        assert client.job(job).tags == ("h100", "nightly")


def test_the_address_has_the_filters(finished: str, open_page: Open) -> None:
    page = open_page(f"#/jobs/{finished}")
    table = page.get_by_role("region", name="Trials of this job")
    page.get_by_label("Outcome").select_option("OK")
    page.get_by_label("Text").fill("zero_stage=3")
    expect(page).to_have_url(re.compile("text="))  # it is looked for when nothing more is typed
    table.get_by_role("button", name="Estimate").click()
    expect(page).to_have_url(re.compile(r"outcome=OK&text=zero_stage%3D3&sort=-estimate$"))
    shown = table.locator("tbody tr").all_inner_texts()
    other = open_page(f"#{page.url.partition('#')[2]}")
    rows = other.get_by_role("region", name="Trials of this job").locator("tbody tr")
    expect(rows).to_have_count(len(shown))
    assert rows.all_inner_texts() == shown


def test_effects_of_the_knobs_that_differ(finished: str, open_page: Open) -> None:
    page = open_page(f"#/compare?trials={finished}:0,{finished}:2")
    table = page.get_by_role("region", name="Predicted effects from trial 0 to trial 2")
    expect(table.locator("tbody tr").first).to_contain_text("%")
    named = set(table.locator("tbody td:first-child").all_inner_texts())
    marked = page.get_by_role("region", name="Trials beside each other").locator("tr.differs th").all_inner_texts()
    assert named == {text.split("(")[0].strip() for text in marked}


def test_a_notification_at_the_end(place: Place, open_page: Open) -> None:
    job = place.submit(trials=3, name="watched", runner="local")  # no worker takes it
    page = open_page(f"#/jobs/{job}")
    page.evaluate(RECORDED)
    page.evaluate("window.permission = 'denied'")
    button = page.get_by_role("button", name="Notify me at the end")
    button.click()
    expect(page.get_by_text("does not allow notifications")).to_be_visible()
    page.evaluate("window.permission = 'granted'")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    with Client(place.url) as client:
        client.cancel(job)
    expect(page.get_by_text("The job was cancelled.")).to_be_visible()
    assert page.evaluate("window.shown") == [["watched: cancelled", job]]


def test_keys(finished: str, open_page: Open) -> None:
    page = open_page("#/")
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.press("?")  # typed into the field
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.locator("main h1").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="By keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
