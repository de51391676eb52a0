"""`autotune lint deepspeed`: what is told, the exit status, and the answer as JSON."""

import json
from pathlib import Path

import pytest
from called import Command


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "gradient_cliping": 1.0}))
    return path


def test_findings_are_told_one_a_line(command: Command, file: Path) -> None:
    answer = command("lint", "deepspeed", str(file))
    assert (answer.status, answer.err) == (0, "")
    assert answer.out == "gradient_cliping: ignored: no part of DeepSpeed reads this key; did you mean gradient_clipping?\n"


def test_what_deepspeed_stops_at_is_a_failure(command: Command, file: Path) -> None:
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "elasticity": {}}')
    assert command("lint", "deepspeed", str(file), "--for", "0.19.8").status == 1
    answer = command("lint", "deepspeed", str(file), "--for", "0.18.0")
    assert (answer.status, answer.out) == (0, f"{file}: nothing that DeepSpeed 0.18.0 would refuse, ignore or change\n")


def test_json_is_one_document(command: Command, file: Path) -> None:
    answer = command("lint", "deepspeed", str(file), "--for", "0.19.8", "--ranks", "8", "--json")
    document = json.loads(answer.out)
    assert (document["format"], document["version"]) == ("deepspeed", "0.19.8")
    assert [finding["rule"] for finding in document["findings"]] == ["unknown-key"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing", "ds_config.json"), "format: 'nothing' is not known; use deepspeed"),
        (("deepspeed", "none.json"), "file: none.json cannot be read as JSON"),
        (("deepspeed", "list.json"), "file: list.json is not a JSON object; give a DeepSpeed configuration"),
        (("deepspeed", "list.json", "--for", "newest"), "for: 'newest' is not a version; write it as in 0.19.8"),
    ],
)
@pytest.mark.usefixtures("file")
def test_what_is_no_configuration(command: Command, folder: Path, words: tuple[str, ...], says: str) -> None:
    (folder / "list.json").write_text("[]")
    answer = command("lint", *words)
    assert (answer.status, answer.out) == (2, "")
    assert says in answer.err
