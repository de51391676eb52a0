"""The tutorials, run as they are written: fenced blocks in the order of the page.

`sh` is run by bash in one folder, with a shell that is kept. `python title="NAME"` is a file; so are `json` and `toml`.
`text` is what the commands before it print, among other lines: `…` stands for any text, and any number for any other.
`sh fails` is a block whose last command has to fail.


Pages that begin with an installation are run in an environment of their own, into which `pip install` puts the wheel of this
tree. They have at most 12 commands.
"""

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.common.wheel_project import build_wheel
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PROGRAM = f'#!/bin/sh\nexec "{sys.executable}" -c "import sys; from autotune.cli import main; sys.exit(main())" "$@"\n'
FENCE = re.compile(r'^```(\w+)(?: title="([\w.-]+)")?( fails)?\n(.*?)^```$', re.MULTILINE | re.DOTALL)

FRESH = [page for page in PAGES if "python3 -m venv" in page.read_text("utf-8")]
# Packages that ours need are those of this environment; the environment itself, pip and the wheel are real.
MAKES_ENVIRONMENTS = f"""#!/bin/sh
"{sys.executable}" "$@" || exit
[ "$1 $2" = "-m venv" ] || exit 0
cd "$3"/lib/python*/site-packages
printf '%s\\n' "{sysconfig.get_path("purelib")}" "{sysconfig.get_path("platlib")}" > around.pth
"""


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


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("source")).parent


def environment_of(page: Path, environment: dict[str, str], folder: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """That of a stranger for pages that install: no program or package of ours is there yet."""
    if page not in FRESH:
        return environment
    tools = folder / "fresh"
    tools.mkdir()
    (tools / "python3").write_text(MAKES_ENVIRONMENTS)
    (tools / "python3").chmod(0o755)
    path = [part for part in os.environ["PATH"].split(":") if not (Path(part) / "autotune").exists()]
    pip = {"NO_INDEX": "1", "FIND_LINKS": str(request.getfixturevalue("wheels")), "NO_DEPS": "1", "FORCE_REINSTALL": "1"}
    fresh = environment | {"PATH": ":".join([str(tools), *path])} | {f"PIP_{name}": value for name, value in pip.items()}
    del fresh["PYTHONPATH"]
    return fresh


@pytest.mark.parametrize("page", FRESH, ids=lambda page: page.stem)
def test_twelve_commands_are_enough(page: Path) -> None:
    commands = [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines() if line.strip()]
    assert 6 <= len(commands) <= 12
    assert "pip install" in commands[1]


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
def test_a_tutorial_does_what_it_says(
    page: Path, environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
    # The port that the page names may be somebody's here.
    script = program(page).replace("8000", str(free_port())) if "--port 8000" in program(page) else program(page)
    environment = environment_of(page, environment, tmp_path, request)
    run = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    for number, line in expected(page):
        output = (folder / f"block{number}.out").read_text(encoding="utf-8")
        assert pattern(line).search(output), f"{line!r} is not in:\n{output}"
