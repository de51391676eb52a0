"""Options by their old names: the same result, and a note on standard error."""

import json
from pathlib import Path

import pytest
from called import Command

SPACE = ("space", "config.json", "--json")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("--seq-len", "32"), ("--sequence-length", "32")),
        (("--seq-len=32",), ("--sequence-length=32",)),
        (("--set", "zero_stage=1", "--set=micro_batch_size=1"), ("--pin", "zero_stage=1", "--pin=micro_batch_size=1")),
    ],
)
def test_an_old_option_does_what_the_present_one_does(command: Command, old: tuple[str, ...], new: tuple[str, ...]) -> None:
    before, after = command(*SPACE, *old), command(*SPACE, *new)
    assert (before.status, before.out) == (after.status, after.out) == (0, after.out)
    names = [word.partition("=")[0] for word in (old[0], new[0])]
    assert (before.err, after.err) == (f"note: {names[0]} is now {names[1]}; the old name still works\n", "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--seq-len", 8, "--sequence-length", 8), "--sequence-length: is given as --seq-len too"),
        (("--pin=zero_stage=1", "--set", "zero_stage=2"), "--pin: is given as --set too"),
    ],
)
def test_both_names_are_refused(command: Command, words: tuple[object, ...], told: str) -> None:
    answer = command(*SPACE, *words)
    line = f"{told}; leave one of them out"
    assert (answer.status, json.loads(answer.out)["error"]["message"], answer.err) == (2, line, f"autotune: {line}\n")


def test_what_is_a_value_or_of_the_own_command_is_not_renamed(command: Command, folder: Path) -> None:
    answer = command("sweep", "--out", "--set", "--config", "--seq-len", "--", "python", "train.py", "--seq-len", "8")
    assert (answer.status, answer.err) == (2, answer.err)
    assert "is now" not in answer.err
    assert "config: --seq-len cannot be read" in answer.err


def test_an_option_of_a_command_that_has_the_old_name_itself_keeps_it(command: Command, folder: Path) -> None:
    (folder / "ds.json").write_text("{}")
    assert "is now" not in command("lint", "deepspeed", "ds.json", "--for", "0.19.8").err


def test_an_old_value_is_noted(command: Command) -> None:
    answer = command("plan", "gpt2", "--max", "seq_len", "--cluster", "dgx-a100", "--space", "nowhere")
    assert answer.err.splitlines()[0] == "note: seq_len is now sequence_length; the old name still works"
    assert answer.status == 2


def test_a_file_with_old_names_is_noted(command: Command, folder: Path) -> None:
    (folder / "sweep.toml").write_text('model = "config.json"\nseq-len = 0\nset = {zero_stage = 1}\n')
    answer = command("sweep", "--config", "sweep.toml")
    assert answer.err.splitlines() == [
        "note: sweep.toml: seq_len is now sequence_length; the old name still works",
        "note: sweep.toml: set is now pins; the old name still works",
        "autotune: sequence_length: 0 is not a whole number of 1 or more; give at least 1",
    ]
