"""`autotune sweep` with the objectives of a series: report, JSON, status, refusals in one line."""

import json
from pathlib import Path

import pytest
import table
from called import Command

from autotune.cli import foreground
from autotune.session.session import Session
from executor.runners.replay import ReplayRunner

SWEEP = ("sweep", "config.json", "--trials", 1, "--strategy", "random", "--confirm-repeats", 0, "--sequence-length", 64)


@pytest.fixture(autouse=True)
def table_instead_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(session: Session) -> ReplayRunner:
        return table.runner(lambda _: table.ok(100.0 * session.world_size))

    monkeypatch.setattr(foreground, "make_runner", made)


@pytest.mark.prove
def test_devices_reports_every_size_and_writes_the_answer(command: Command, folder: Path) -> None:
    answer = command(*SWEEP, "--objective", "devices", "--rate", 150, "--ranks", "1,2,4")
    assert answer.status == 0, answer.err
    assert "devices: 2 ranks reach 150 samples/s: 200 [" in answer.out
    assert "written to best-config.json" in answer.out
    assert json.loads((folder / "best-config.json").read_text())["job"]["request"]["ranks"] == 2
    assert "1 ranks, samples of 64 tokens" in answer.err


@pytest.mark.prove
def test_a_rate_that_nobody_reaches_ends_with_three(command: Command, folder: Path) -> None:
    answer = command(*SWEEP, "--objective", "devices", "--rate", 1e6, "--ranks", "1,2", "--json")
    found = json.loads(answer.out)
    assert (answer.status, found["answer"], len(found["entries"])) == (3, None, 2)
    assert "the most is 200 [" in found["message"]
    assert not (folder / "best-config.json").exists()


@pytest.mark.prove
def test_cost_is_one_document(command: Command) -> None:
    answer = command(*SWEEP, "--objective", "cost", "--price", 2.5, "--ranks", "1, 2", "--json")
    found = json.loads(answer.out)
    assert (answer.status, found["objective"], answer.err) == (0, "cost", "")
    assert found["answer"]["cost_per_million_tokens"]["mean"] == pytest.approx(2.5 / 3600 / 6400 * 1e6, rel=1e-3)


@pytest.mark.prove
def test_an_answer_for_many_is_labelled(command: Command) -> None:
    answer = command(*SWEEP, "--tune-on", "1x2", "--answer-for", "4x2")
    assert answer.status == 0, answer.err
    assert "extrapolated to 8 devices, not measured: " in answer.out


@pytest.mark.prove(every=3)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--objective", "cost", "--ranks", "1,2"), "price: is missing for the objective cost"),
        (("--objective", "devices", "--ranks", "1,2"), "rate: is missing for the objective devices"),
        (("--objective", "cost", "--price", "-1", "--ranks", "1,2"), "price: -1.0 is not positive"),
        (("--price", "1"), "price: applies to a series of jobs (cost, devices, sequence, scale)"),
        (("--ranks", "1,2"), "ranks: has several values for one job"),
        (("--ranks", "two"), "ranks: 'two' is not a number of ranks; write 2, or 1,2,4"),
        (("--ranks", "0"), "ranks: 0 is not a whole number of 1 or more"),
        (("--objective", "sequence"), "memory_limit: is missing for the objective sequence"),
        (("--resume", "1", "--price", "1"), "resume: a job is resumed with its own request"),
        (("--tune-on", "1x2"), "answer_for: is missing"),
    ],
)
def test_bad_input_is_one_line(command: Command, folder: Path, words: tuple[str, ...], says: str) -> None:
    answer = command(*SWEEP, *words)
    lines = answer.err.splitlines()
    assert (answer.status, answer.out, len(lines)) == (2, "", 1), answer.err
    assert says in lines[0]
    assert not (folder / "jobs.db").exists()


def test_a_service_is_told_the_way(command: Command) -> None:
    answer = command("submit", "config.json", "--objective", "cost", "--db", "jobs.db")
    assert (answer.status, len(answer.err.splitlines())) == (2, 1)
    assert "cost is a series of jobs of several sizes, not one job; run it with `autotune sweep`" in answer.err
