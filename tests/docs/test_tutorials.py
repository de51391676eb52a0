"""The tutorials, run as they are written: fenced blocks in the order of the page.

`sh` is run by bash in one folder, with a shell that is kept. `python title="NAME"` is a file; so are `json` and `toml`.
`text` is what the commands before it print, among other lines: `…` stands for any text, and any number for any other.
`sh fails` is a block whose last command has to fail.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PROGRAM = f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; from autotune.cli import main; sys.exit(main())" "$@"\n'
FENCE = re.compile(r'^```(\w+)(?: title="([\w.-]+)")?( fails)?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    fails: bool
    text: str


def blocks(page: Path) -> list[Block]:
    return [
        Block(kind, title, bool(fails), text) for kind, title, fails, text in FENCE.findall(page.read_text(encoding="utf-8"))
    ]


def program(page: Path) -> str:
    """The commands of a page as one bash script. The output of each block goes to `blockN.out`, N from 0."""
    lines = ["set -u", "trap 'kill $(jobs -p) 2>/dev/null' EXIT"]
    for number, block in enumerate(blocks(page)):
        if block.language != "sh":
            continue
        check = "[ $status -ne 0 ]" if block.fails else "[ $status -eq 0 ]"
        # Braces, not a subshell: variables and background jobs are those of the commands that follow.
        lines += [
            f"{{ {block.text}}} > block{number}.out 2>&1",
            "status=$?",
            f"{check} || {{ cat block{number}.out; exit 1; }}",
        ]
    return "\n".join(lines) + "\n"


def expected(page: Path) -> list[tuple[int, str]]:
    """Lines of output, each with the number of the block whose commands print it."""
    found, last = [], -1
    for number, block in enumerate(blocks(page)):
        if block.language == "sh":
            last = number
        elif block.language == "text":
            found += [(last, line) for line in block.text.splitlines() if line.strip()]
    return found


def pattern(line: str) -> re.Pattern[str]:
    """What a line of a page stands for."""
    text = r"\s+".join(re.escape(word) for word in line.split())
    return re.compile(re.sub(r"\d+(?:(?:,\d{3})+|\\\.\d+)?", r"[\\d.,]+", text).replace("…", ".*"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment in which `autotune` and `python` are this working tree's, and no database is anybody's."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "autotune").write_text(PROGRAM)
    (tools / "autotune").chmod(0o755)
    given = {name: value for name, value in os.environ.items() if not name.startswith("AUTOTUNE_")}
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return given | {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "NO_COLOR": "1",
        "COLUMNS": "300",
    }


def test_every_page_of_the_index_is_a_program() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"(tutorials/{page.name})" not in index] == []
    for page in PAGES:
        assert any(block.language == "sh" for block in blocks(page)), page.name
        assert all(number >= 0 for number, _ in expected(page)), page.name


def test_a_line_of_a_page_stands_for_lines_with_other_numbers() -> None:
    assert pattern("trial 0: OK … samples/s  zero_stage=0").search("trial 0: OK  123.1 [110.1, 136] samples/s zero_stage=3")
    assert pattern("model (70,553,706,496 parameters)").search("model (1 parameters)")
    assert not pattern("succeeded: 4 of 4 trials are spent").search("failed: 4 of 4 trials are spent")


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_does_what_it_says(page: Path, environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
    run = subprocess.run(
        ["bash", "-c", program(page)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for number, line in expected(page):
        output = (folder / f"block{number}.out").read_text(encoding="utf-8")
        assert pattern(line).search(output), f"{line!r} is not in:\n{output}"
