"""What fits: the answer first, cards side by side, and the file."""

import re

from playwright.sync_api import expect

from tests.page.conftest import PHONE, Open


def test_what_fits_is_told_first_with_its_file(open_page: Open) -> None:
    page = open_page("#/fit")
    page.get_by_label("Model", exact=True).fill("llama-2-7b")
    page.get_by_label("Cards", exact=True).fill("1x4090")
    page.get_by_label("Rows of the dataset").fill("50000")
    page.get_by_role("button", name="Show", exact=True).click()
    answer = page.get_by_role("region", name="On 1x4090", exact=True)
    expect(answer.get_by_text("Fastest that fits: ")).to_be_visible()
    expect(answer).to_contain_text(re.compile(r"tokens/s, [\d.,]+ \[[\d.,]+, [\d.,]+\] hours"))
    expect(answer.get_by_text("Fastest that fits: ")).to_be_in_viewport()
    few = answer.get_by_role("row").count()
    answer.get_by_role("button", name=re.compile(r"^Show all \d+ ways")).click()
    assert answer.get_by_role("row").count() > few
    answer.get_by_label("The fastest way's file").select_option("trl")
    expect(answer.get_by_label("File for trl")).to_have_value(re.compile("model_name_or_path: llama-2-7b"))
    expect(answer.get_by_text("start it by: trl sft --config FILE")).to_be_visible()
    assert "model=llama-2-7b" in page.url


def test_cards_are_side_by_side_and_a_link_opens_them(open_page: Open) -> None:
    page = open_page("#/fit?model=llama-2-7b&cluster=1x4090,2x4GB")
    expect(page.get_by_role("region", name="On 1x4090", exact=True)).to_contain_text("Fastest that fits: ")
    expect(page.get_by_role("region", name="On 2x4GB", exact=True)).to_contain_text("Nothing fits.")
    expect(page.get_by_role("region", name="On 2x4GB", exact=True)).to_contain_text("What would do: ")


def test_a_refusal_names_the_field(open_page: Open) -> None:
    page = open_page("#/fit?model=llama-2-7b&cluster=2x24", viewport=PHONE, expected=("422 (Unprocessable",))
    expect(page.get_by_role("alert")).to_contain_text("2x24")
