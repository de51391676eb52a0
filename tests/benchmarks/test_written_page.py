"""The page of a benchmark: where it is written, and where it is not."""

from pathlib import Path

import pytest

from benchmarks.common.written_page import give, judge, page_parser


def test_lines_are_printed_and_written_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    give(["# Title", "", "text ▁█"], page)
    give(["# Title", "", "text ▁█"], None)
    assert capsys.readouterr().out == 2 * page.read_text(encoding="utf-8") == 2 * "# Title\n\ntext ▁█\n"


def test_a_page_with_problems_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert judge("text\n", ["fp32 is off", "bf16 is off"], page) == 1
    assert capsys.readouterr().out == "text\n\nWRONG fp32 is off\nWRONG bf16 is off\n"
    assert not page.exists()
    assert judge("text\n", [], page) == 0
    assert page.read_text() == "text\n"


def test_a_benchmark_adds_its_own_options() -> None:
    parser = page_parser("What it measures.\n\n    python benchmarks/it.py")
    parser.add_argument("--steps", type=int, default=60)
    assert vars(parser.parse_args(["--markdown", "docs/it.md"])) == {"markdown": Path("docs/it.md"), "steps": 60}
    assert "    python benchmarks/it.py\n" in parser.format_help()
