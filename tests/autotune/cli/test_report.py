"""`autotune report`: where it writes, and what it refuses."""

from pathlib import Path

import pytest
from called import Command
from swept import swept

from storage.store import open_store


@pytest.fixture
def job(folder: Path) -> str:
    with open_store(str(folder / "jobs.db")) as store:
        return swept(folder, store, trials=5, confirm_repeats=0)


@pytest.mark.prove
def test_a_page_and_markdown(command: Command, folder: Path, job: str) -> None:
    assert command("report", job[:-1], "--out", "report.html") == command("report", "--out", "report.md")
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    written = (folder / "report.md").read_text(encoding="utf-8")
    assert written.startswith("# ")
    printed = command("report", job, "--format", "md")
    assert printed.status == 0
    assert printed.out.splitlines()[0] == written.splitlines()[0]


def test_refusals_are_one_line_and_leave_nothing(command: Command, folder: Path, job: str) -> None:
    before = sorted(folder.iterdir())
    for words in (
        ["report"], ["report", "--format", "pdf", "--out", "x.pdf"], ["report", "--out", "no/such/folder/report.html"],
        ["report", "19990101", "--out", "report.html"], ["report", "--out", "."],
    ):  # fmt: skip
        answer = command(*words)
        assert (answer.status, answer.out) == (2, ""), words
        assert answer.err.count("\n") == 1
    assert sorted(path for path in folder.iterdir() if "jobs.db" not in path.name) == [
        path for path in before if "jobs.db" not in path.name
    ]
