"""A sweep of a user's own script on this machine's cores: without torch, so that a trial takes a second."""

import json
from pathlib import Path
from typing import Any

import pytest
from called import Command

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, time
import autotune

batch, accumulate, workers = map(int, sys.argv[1:])
while True:
    time.sleep((0.004 + 0.002 * batch) * accumulate * (2.0 if workers == 0 else 1.0))
    autotune.report(samples=batch * accumulate * 2, loss=0.5)
"""
WORDS = ("python", "train.py", "{micro_batch_size}", "{gradient_accumulation_steps}", "{workers}")
BRIEF = ("--runner", "local", "--ranks", 2, "--trials", 6, "--trial-seconds", 0.1, "--confirm-repeats", 0, "--strategy", "grid")


@pytest.fixture
def script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (folder / "train.py").write_text(SCRIPT)
    return folder


def test_a_script_is_tuned_as_it_is(script: Path, command: Command) -> None:
    answer = command("sweep", "--engine", "command", *BRIEF, "--script-knob", "workers=0,2", "--parameters", "1M", "--", *WORDS)
    assert answer.status == 0, answer.err
    assert "train.py on local with 2 ranks" in answer.err
    assert "note: no placeholder of the command carries zero_stage, activation_checkpointing" in answer.err
    best: dict[str, Any] = json.loads((script / "best-config.json").read_text())
    assert (best["engine"], best["model"]["name"]) == ("command", "train.py")
    assert (best["best"]["config"]["micro_batch_size"], best["best"]["config"]["script"]) == (4, "workers=2")
    assert best["baseline"]["gain"]["mean"] > 1.5
    assert best["launch"]["command"].endswith("train.py 4 1 2")
    assert "train.py on local" in command("show").out
    assert "workers=2" in command("explain").out
    refused = command("verify", "best-config.json", "--engine", "native")
    assert (refused.status, "native does not run the script that was tuned; use command" in refused.err) == (2, True)
    verified = command("verify", "best-config.json", "--engine", "command", "--rounds", 1)
    assert verified.status == 0, verified.err
    assert "on command: " in verified.out


def test_a_script_that_measures_nothing_reaches_the_terminal_with_the_remedy(script: Path, command: Command) -> None:
    (script / "train.py").write_text("import sys\nsys.exit(0)\n")
    answer = command("sweep", *BRIEF, "--set", "micro_batch_size=1", "--", "python", "train.py", "{micro_batch_size}")
    assert answer.status == 1
    assert "the script exited with code 0 without a measurement; call autotune.report(samples=…)" in answer.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--", "torchrun", "train.py"), "torchrun would start ranks of its own on each rank"),
        (("--", "python", "train.py", "{micro_batch}"), "did you mean micro_batch_size?"),
        (("--pattern", "x"), "pattern: belongs to a command; write the command after --"),
        (("llama-tiny", "--", "python", "train.py"), "model: is what the command trains"),
        (("--script-knob", "workers", "--", "python", "train.py"), "'workers' is no NAME=VALUES"),
        (("--parameters", "many", "--", "python", "train.py"), "'many' is no number of parameters"),
        (("--engine", "command"), "model: is missing; give a preset, a config.json or module:factory, or a command"),
    ],
)
def test_bad_input_is_one_line(folder: Path, command: Command, words: tuple[str, ...], line: str) -> None:
    answer = command("sweep", *words)
    assert (answer.status, answer.out) == (2, "")
    assert line in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not (folder / "jobs.db").exists()
