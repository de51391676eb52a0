"""docs/knobs.md is what the code says."""

from pathlib import Path

from search_spaces.reference import knobs_page_markdown

PAGE = Path(__file__).parents[2] / "docs" / "knobs.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == knobs_page_markdown()
