"""`autotune explain`: what it prints, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import pytest
import table
from called import Command

from autotune.loop.loop import run_job
from autotune.question.assumption import assumption
from autotune.request.rows import request_to_row
from search_spaces.outcome import Outcome
from storage.store import open_store

TITLES = (
    "Where the time goes", "Where the memory goes", "What each knob contributes", "What limits it",
    "Which hardware would help most",
)  # fmt: skip


@pytest.fixture
def job(folder: Path) -> str:
    session = table.session(folder, trials=5, strategy="random", confirm_repeats=0, memory_limit=20_000_000)
    assumed = (assumption("sequence_length", session.request.sequence_length, "--sequence-length"),)
    session = dataclasses.replace(session, request=dataclasses.replace(session.request, resolved_assumed=assumed))
    with open_store(str(folder / "jobs.db")) as store:
        opened = store.jobs.create(request_to_row(session.request))
        run_job(session, store, opened.id, table.runner())
    return opened.id


@pytest.mark.prove
def test_the_report_fits_a_hundred_columns(command: Command, job: str) -> None:
    answer = command("explain")
    assert (answer.status, answer.err) == (0, "")
    assert [title for title in TITLES if f"\n{title}\n" not in answer.out] == []
    assert max(len(line) for line in answer.out.splitlines()) <= 100
    assert job in answer.out
    assert "\nassumed, because it was not stated:\n  sequence_length=" in answer.out


@pytest.mark.prove
def test_json_and_markdown(command: Command, job: str, folder: Path) -> None:
    answer = command("explain", job[:-1], "--json", "--markdown", "why.md")
    assert answer.status == 0
    assert json.loads(answer.out)["job"] == job
    assert json.loads(answer.out)["assumed"][0]["stated_by"].startswith("--")
    written = (folder / "why.md").read_text(encoding="utf-8")
    assert [title for title in TITLES if f"## {title}\n" not in written] == []


def test_refusals_are_one_line(command: Command, folder: Path, job: str) -> None:
    unknown = command("explain", "19990101")
    assert (unknown.status, unknown.out) == (2, "")
    assert unknown.err.count("\n") == 1

    session = table.session(folder, trials=3, strategy="random")
    with open_store(str(folder / "jobs.db")) as store:
        opened = store.jobs.create(request_to_row(session.request))
        run_job(session, store, opened.id, table.runner(lambda _: table.ended(Outcome.FAILED, "no")))
    nothing = command("explain")
    assert (nothing.status, nothing.out) == (1, "")
    assert "FAILED" in nothing.err
    assert nothing.err.count("\n") == 1

    assert command("explain", job, "--markdown", "no/such/folder/why.md").status == 2
