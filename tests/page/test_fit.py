"""What fits: the answer first, cards side by side, and the file."""

import re
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from benchmarks.prediction import fit_page
from tests.page.conftest import PHONE, Open


@pytest.mark.prove
def test_what_fits_is_told_first_with_its_file(open_page: Open) -> None:
    page = open_page("#/fit")
    page.get_by_label("Model", exact=True).fill("llama-2-7b")
    page.get_by_label("Cards", exact=True).fill("1x4090")
    page.get_by_label("Rows of the dataset").fill("50000")
    page.get_by_label("Samples per step").fill("128")
    page.get_by_role("button", name="Show", exact=True).click()
    answer = page.get_by_role("region", name="On 1x4090", exact=True)
    expect(answer.get_by_text("Fastest that fits: ")).to_be_visible()
    expect(answer).to_contain_text(re.compile(r"tokens/s, [\d.,]+\s\[[\d.,]+,\s[\d.,]+\]\shours"))
    expect(answer.get_by_text("Fastest that fits: ")).to_be_in_viewport()
    few = answer.get_by_role("row").count()
    answer.get_by_role("button", name=re.compile(r"^Show all \d+ ways")).click()
    assert answer.get_by_role("row").count() > few
    answer.get_by_label("The fastest way's file").select_option("trl")
    expect(answer.get_by_label("File for trl")).to_have_value(re.compile("model_name_or_path: llama-2-7b"))
    expect(answer.get_by_text("start it by: trl sft --config FILE")).to_be_visible()
    assert "model=llama-2-7b" in page.url


@pytest.mark.prove
def test_cards_are_side_by_side_and_a_link_opens_them(open_page: Open) -> None:
    page = open_page("#/fit?model=llama-2-7b&cluster=1x4090,2x4GB")
    expect(page.get_by_role("region", name="On 1x4090", exact=True)).to_contain_text("Fastest that fits: ")
    expect(page.get_by_role("region", name="On 2x4GB", exact=True)).to_contain_text("Nothing fits.")
    expect(page.get_by_role("region", name="On 2x4GB", exact=True)).to_contain_text("What would do: ")


def test_a_refusal_names_the_field(open_page: Open) -> None:
    page = open_page("#/fit?model=llama-2-7b&cluster=2x24", viewport=PHONE, expected=("422 (Unprocessable",))
    expect(page.get_by_role("alert")).to_contain_text("2x24")


@pytest.mark.prove
def test_the_file_without_a_server_shows_what_fit_answers(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fit.html"
    monkeypatch.setattr(sys, "argv", ["fit_page", "--out", str(path), "--small"])
    fit_page.main()
    page = browser.new_context().new_page()
    faults: list[object] = []
    page.on("pageerror", lambda error: faults.append(error))
    page.goto(path.as_uri())
    model, card = fit_page.MODELS[1], fit_page.CARDS[2]
    for label, value in {"Model": model, "Card": card, "Cards": "2", "Tokens per sample": "4096"}.items():
        page.get_by_label(label, exact=True).select_option(value)
    (fastest,) = (row for row in fit_page.rows_of((model, card, 2, 4096)) if row[13] == 2)
    expect(page.get_by_role("status")).to_contain_text(f"Fastest that fits: {fastest[0]}, {fastest[1]}")
    expect(page.get_by_role("status")).to_contain_text(f"{fastest[10]:,} [{fastest[11]:,}, {fastest[12]:,}] tokens/s")
    page.get_by_label("show every way").check()
    assert page.locator("tbody tr").count() == len(fit_page.rows_of((model, card, 2, 4096)))
    assert f"--on 2x{card} --sequence-length 4096" in page.locator("#command").inner_text()
    page.context.close()
    assert not faults
