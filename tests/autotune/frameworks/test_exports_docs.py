"""The examples of docs/exports.md are lines of what exporters write."""

import re
from pathlib import Path

import export_cases as cases
import pytest

PAGE = Path(__file__).parents[3] / "docs" / "exports.md"
GOLDEN = Path(__file__).parent / "golden"


def examples() -> dict[str, list[str]]:
    """Format -> the lines of its example, `…` standing for what is left out."""
    page = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^`([a-z-]+)` – [^\n]*\n\n```\w*\n(.*?)```", page, re.MULTILINE | re.DOTALL)
    return {name: [line for line in text.splitlines() if line.strip() not in ("", "…")] for name, text in found}


def test_every_format_has_one() -> None:
    assert {*examples()} == {*cases.SUFFIXES} - {"json"}


@pytest.mark.parametrize("name", [name for name in cases.SUFFIXES if name != "json"])
def test_its_lines_are_of_the_golden_file(name: str) -> None:
    golden = (GOLDEN / f"{name}-zero-3.{cases.SUFFIXES[name]}").read_text(encoding="utf-8").splitlines()
    lines = examples()[name]
    assert len(lines) >= 3
    assert [line for line in lines if line not in golden] == []
