"""What people wrote is shown on a terminal, never obeyed by it."""

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from called import Command

from autotune.logs import TextLines
from autotune.text.console import Console
from autotune.text.rows import bytes_text
from autotune.text.visible_text import visible, visible_line
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.quantities import number_text
from search_spaces.trial import LogLines, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.records import Submission
from storage.store import open_store

ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202eabc\r[red]x[/red]"
FORBIDDEN = set("\x1b\x07\x9b\x7f\u202e\r")


def test_control_characters_become_visible() -> None:
    assert visible("a\tb\n\x1b[0m\x9b\u202e") == "a\tb\n␛[0m��"
    assert visible_line("one\ntwo") == "one␊two"


def test_a_console_sends_its_own_colours_and_nothing_of_others() -> None:
    sink = io.StringIO()
    console = Console(file=sink, force_terminal=True, width=80)
    console.print(f"bold {ATTACK}", style="bold", highlight=False)
    sent = sink.getvalue()
    assert sent.startswith("\x1b[1m")
    assert "owned" in sent and "[red]x[/red]" in sent, "it is text, and no markup"
    assert "\x1b]0" not in sent and "\x1b[2J" not in sent and not set(sent) & (FORBIDDEN - {"\x1b"})


def test_a_line_of_the_log_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "job %s", (f"a\n2026-01-01 forged {ATTACK}",), None)
    line = TextLines().format(record)
    assert "\n" not in line
    assert not set(line) & FORBIDDEN


@pytest.fixture
def database(tmp_path: Path) -> str:
    """A job whose submitter, and whose trial, write escape sequences wherever they can."""
    path = str(tmp_path / "jobs.db")
    with open_store(path) as store:
        store.keys.create(ATTACK.replace("\r", ""), {"read"})
        job = store.queue.submit({"model": "m", "name": ATTACK, "note": ATTACK, "tags": ["t"]}, Submission(submitter=ATTACK))[0]
        lease = store.jobs.acquire(job.id, current_owner())
        store.trials.add(lease, TrialConfig(), Purpose.SEARCH)
        attempt = store.attempts.start(lease, 0)
        store.logs.add(lease, [LogLines(attempt=attempt.token, rank=0, text=f"{ATTACK}\n")])
        store.attempts.finish(lease, TrialResult(attempt=attempt.token, outcome=Outcome.FAILED, message=ATTACK))
        store.jobs.release(lease, JobState.FAILED, "failed", ATTACK)
    return path


@pytest.mark.prove(every=6)
@pytest.mark.parametrize(
    "words",
    [
        ["show", "latest"], ["logs", "latest", "0"], ["jobs"], ["keys", "list"], ["keys", "quota"], ["audit"],
        ["audit", "--format", "jsonl"], ["pause", "latest"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_command_prints_them(command: Command, database: str, words: list[str]) -> None:
    done = command(*words, "--db", database)
    printed = done.out + done.err
    assert printed
    assert not set(printed) & FORBIDDEN, repr(printed)


def test_large_rates_and_sizes_have_no_powers_of_ten() -> None:
    assert [number_text(value) for value in (0.012341, 12.345, 1234.5, 9999.6, 12345.6)] == [
        "0.01234", "12.35", "1234", "10,000", "12,346",
    ]  # fmt: skip
    assert [bytes_text(value) for value in (1000, 1023 * 2**20, 1712.4 * 2**30)] == ["1000 B", "1,023 MiB", "1,712 GiB"]


def called(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from autotune.cli import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


@pytest.mark.prove
def test_an_output_without_these_characters() -> None:
    answer = called("predict", "gpt2", "--cluster", "dgx-h100:1", PYTHONIOENCODING="ascii")
    assert (answer.returncode, "samples/s" in answer.stdout) == (0, True), answer.stderr


@pytest.mark.prove
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", ["engines", "space gpt2 --json", "plan gpt2 --top x --json"])
def test_an_output_that_is_full(words: str) -> None:
    command = [sys.executable, "-c", "from autotune.cli import main; main()", *words.split()]
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1] == "autotune: output: cannot be written, no space is left; free some where it goes"
    assert "Traceback" not in answer.stderr
