"""docs/knobs.md is what the code says."""

from pathlib import Path

from autotune.cli.engines import knobs_page_markdown

PAGE = Path(__file__).parents[3] / "docs" / "knobs.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == knobs_page_markdown()
