"""The form: what it says before anything runs, and what it opens."""

import re

import pytest
from playwright.sync_api import Page, expect

from autotune.client import Client
from tests.page.conftest import Open
from tests.page.place import Place

SMALL = {"Ranks": "2", "Global batch size": "8", "Sequence length": "64"}
REFUSED = "422 (Unprocessable"


def fill(page: Page, **entries: str) -> None:
    for label, text in {**SMALL, **entries}.items():
        page.get_by_label(re.compile(f"^{label}")).fill(text)


def jobs(place: Place) -> list[str]:
    with Client(place.url) as client:
        return [job.id for job in client.jobs()]


def test_a_job_is_submitted_and_watched_to_its_end(place: Place, open_page: Open) -> None:
    page = open_page("#/new")
    fill(page, Trials="6")
    before = page.get_by_role("complementary", name="Before anything runs")
    expect(before.get_by_text("Ready to submit.")).to_be_visible()
    expect(before.get_by_text("24 configurations")).to_be_visible()
    expect(before).to_contain_text("Predicted best")
    expect(before).to_contain_text("x the baseline")
    expect(before).to_contain_text("device-hours, by predictions")
    page.get_by_role("button", name="Submit").click()
    expect(page).to_have_url(re.compile("#/jobs/"))
    expect(page.locator("main h1")).to_have_text("llama-tiny")
    expect(page.get_by_text("Succeeded").first).to_be_visible()
    expect(page.get_by_text("6 of 6 trials", exact=True)).to_be_visible()
    expect(page.locator("[data-figure=throughput_memory] figcaption")).to_contain_text("The best")


@pytest.mark.prove
def test_what_nobody_stated_is_shown_before_and_after(open_page: Open) -> None:
    page = open_page("#/new")
    page.get_by_label("Model", exact=True).fill("gpt2")
    fill(page, **{"Sequence length": "", "Trials": "1", "Memory limit": "2GiB"})
    before = page.get_by_role("complementary", name="Before anything runs")
    expect(before.get_by_text("sequence_length=128 (Sequence length)")).to_be_visible()
    expect(before).to_contain_text(re.compile(r"with 1,024: (fits|may fit|does not fit) \("))
    before.get_by_text(re.compile(r"^\d+ values$")).click()
    expect(before.get_by_text("objective=throughput")).to_be_visible()
    expect(before.get_by_text("optimizer=adamw")).to_be_visible()
    page.get_by_role("button", name="Submit").click()
    expect(page).to_have_url(re.compile("#/jobs/"))
    expect(page.get_by_role("heading", name="Assumed, because nobody stated it")).to_be_visible()
    expect(page.get_by_text("sequence_length=128 (--sequence-length)")).to_be_visible()


@pytest.mark.prove
def test_a_cluster_of_gpus_needs_a_workload(open_page: Open) -> None:
    page = open_page("#/new", expected=(REFUSED,))
    page.get_by_label("Model", exact=True).fill("llama-3-8b")
    length = page.get_by_label(re.compile("^Sequence length"))
    expect(length).not_to_have_attribute("required", "")
    page.get_by_label("Cluster", exact=True).fill("dgx-h100")
    expect(length).to_have_attribute("required", "")
    expect(length).to_have_accessible_description(re.compile("llama-3-8b takes at most 8,192"))
    expect(page.get_by_text("2 entries to correct.")).to_be_visible()
    expect(length).to_have_attribute("aria-invalid", "true")
    length.fill("4096")
    page.get_by_label(re.compile("^Global batch size")).fill("64")
    expect(page.get_by_text("Ready to submit.")).to_be_visible()


@pytest.mark.prove
def test_names_that_no_list_has_are_entered_as_text(open_page: Open) -> None:
    page = open_page("#/new", expected=(REFUSED,))
    page.get_by_label("Model", exact=True).fill("meta-llama/Llama-3.1-8B-Instruct")
    fill(page, Ranks="", **{"Sequence length": "4096", "Global batch size": "64"})
    cluster = page.get_by_label("Cluster", exact=True)
    for name, problem in (("8xh10", "8xh10: no device preset has this name"), ("8xh100:x", "'x' is not a number of nodes")):
        cluster.fill(name)
        expect(cluster).to_have_accessible_description(re.compile(problem, re.IGNORECASE))
    for name in ("8xh100:4", "p5.48xlarge"):
        cluster.fill(name)
        expect(page.get_by_text("Ready to submit.")).to_be_visible()
        expect(page.get_by_role("complementary")).to_contain_text(f" of {name}")


@pytest.mark.prove
def test_what_is_wrong_is_said_at_its_entry_while_it_is_typed(place: Place, open_page: Open) -> None:
    known = jobs(place)
    page = open_page("#/new", expected=(REFUSED,))
    fill(page, Trials="many")
    entry = page.get_by_label(re.compile("^Trials"))
    expect(entry).to_have_attribute("aria-invalid", "true")
    expect(entry).to_have_accessible_description(re.compile("is not a whole number"))
    expect(page.get_by_text("1 entry to correct.")).to_be_visible()
    entry.fill("5")
    expect(entry).not_to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="Add a knob").first.click()
    page.get_by_label("Knob", exact=True).select_option("zero_stage")
    page.get_by_label("Values of zero_stage").fill("9")
    expect(page.get_by_role("group", name="zero_stage")).to_contain_text("9")
    expect(page.get_by_label("Values of zero_stage")).to_have_attribute("aria-invalid", "true")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_label("Values of zero_stage")).to_be_focused()
    page.get_by_label("Values of zero_stage").fill("2, 3")
    expect(page.get_by_text("12 configurations")).to_be_visible()
    assert jobs(place) == known


@pytest.mark.prove
def test_a_model_that_is_pasted(open_page: Open) -> None:
    page = open_page("#/new", expected=(REFUSED,))
    page.get_by_label("config.json", exact=True).check(force=True)
    expect(page.get_by_text("Paste a config.json, or choose its file.").first).to_be_visible()
    content = page.get_by_label("Its content")
    content.fill('{"hidden_size": 64}')
    expect(content).to_have_attribute("aria-invalid", "true")
    content.fill(
        '{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,'
        ' "vocab_size": 256, "max_position_embeddings": 128}'
    )
    fill(page)
    expect(page.get_by_text("Ready to submit.")).to_be_visible()
    expect(page.get_by_role("complementary")).to_contain_text("uploaded")


@pytest.mark.prove
def test_a_double_click_opens_one_job(place: Place, open_page: Open) -> None:
    known = jobs(place)
    page = open_page("#/new")
    fill(page, Trials="1", Seed="4") if page.get_by_label("Seed").is_visible() else fill(page, Trials="1")
    expect(page.get_by_text("Ready to submit.")).to_be_visible()
    page.get_by_role("button", name="Submit").dblclick()
    expect(page).to_have_url(re.compile("#/jobs/"))
    assert len(jobs(place)) == len(known) + 1


@pytest.mark.nightly
def test_a_clone_begins_with_what_the_job_was_asked_for(place: Place, finished: str, open_page: Open) -> None:
    page = open_page(f"#/new?from={finished}")
    expect(page.get_by_label(re.compile("^Trials"))).to_have_value("24")
    expect(page.get_by_label(re.compile("^Memory limit"))).to_have_value("20 MiB")
    page.get_by_text("How it searches, and more").click()
    expect(page.get_by_label("Strategy")).to_have_value("grid")
    expect(page.get_by_text("Ready to submit.")).to_be_visible()
    page.get_by_label(re.compile("^Trials")).fill("2")
    expect(page.get_by_text("Ready to submit.")).to_be_visible()
    page.get_by_role("button", name="Submit").click()
    expect(page).to_have_url(re.compile("#/jobs/(?!" + finished + ")"))
    with Client(place.url) as client:
        made, first = client.job(page.url.rpartition("/")[2]).request, client.job(finished).request
    assert {name for name in first if first[name] != made[name]} == {"trials"}


@pytest.mark.prove
def test_by_keyboard_alone(open_page: Open) -> None:
    page = open_page("#/")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.get_by_role("link", name="New job").first.focus()
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("New job")
    reach(page, "Ranks")
    page.keyboard.type("2")
    reach(page, "Trials")
    page.keyboard.type("1")
    expect(page.get_by_text("Ready to submit.")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("#/jobs/"))


def reach(page: Page, label: str) -> None:
    """Press Tab until the entry of that label has the focus."""
    entry = page.get_by_label(re.compile(f"^{label}"))
    for _ in range(60):
        if entry.evaluate("element => element === document.activeElement"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {label}")
