"""`autotune challenge`: what it prints, its JSON, its exit status, and one line for bad input; on real ranks."""

import json
from pathlib import Path

import pytest
from called import Command
from lint_recipes import RECIPES

SHIPPED = RECIPES / "bridge-949-shipped.args"
TINY = ("--model", "llama-tiny", "--cluster", "local", "--ranks", 2, "--sequence-length", 64)


def slow_recipe(folder: Path) -> Path:
    """A DeepSpeed file for two ranks: one sample a micro-batch, at stage 3."""
    path = folder / "ds_config.json"
    path.write_text(
        '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,'
        ' "zero_optimization": {"stage": 3}}'
    )
    return path


@pytest.mark.prove
def test_by_predictions_only(command: Command, folder: Path) -> None:
    answer = command("challenge", slow_recipe(folder), *TINY, "--predict-only")
    assert (answer.status, answer.err) == (1, "")
    assert "micro_batch_size=8" in answer.out
    assert answer.out.splitlines()[-1].startswith("by prediction: beaten; the best rival is ")
    answer = command("challenge", SHIPPED, "--cluster", "dgx-h100:2", "--predict-only", "--json", "--rivals", 2)
    found = json.loads(answer.out)
    assert (found["format"], found["by"], len(found["rivals"])) == ("megatron-bridge", "prediction", 2)
    assert found["rivals"][0]["settings"] and found["rivals"][0]["predicted"]["mean"] > 0
    assert answer.status == (1 if found["result"] == "beaten" else 0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((SHIPPED, "--predict-only"), "cluster: is missing: predictions need one; give --cluster NAME:NODES"),
        ((RECIPES / "deepspeed-zero2.json",), "model: deepspeed-zero2.json does not say which model it trains; give --model"),
        (("none.toml",), "none.toml cannot be read"),
        ((RECIPES / "deepspeed-zero2.json", *TINY, "--engine", "none"), "engine: 'none' is not known"),
    ],
)
def test_bad_input_is_one_line(command: Command, words: tuple[object, ...], says: str) -> None:
    answer = command("challenge", *words)
    assert (answer.status, answer.out) == (2, "")
    assert says in answer.err.splitlines()[-1]


@pytest.mark.nightly
def test_real_trials_beat_a_slow_recipe_and_not_its_winner(command: Command, folder: Path) -> None:
    local = ("--cluster", "local", "--ranks", 2, "--runner", "local", "--rivals", 3, "--db", folder / "jobs.db", "--json")
    beaten = command("challenge", slow_recipe(folder), *TINY, *local[4:], "--rounds", 3)
    found = json.loads(beaten.out)
    assert (beaten.status, found["result"]) == (1, "beaten"), found
    assert found["best"]["differences"]["micro_batch_size"] == 8 and found["gain"]["low"] > 1.0
    assert command("export", "--db", folder / "jobs.db", "--out", folder / "best-config.json").status == 0
    again = command("challenge", folder / "best-config.json", *local, "--rounds", 3)
    assert (again.status, json.loads(again.out)["result"] in ("not beaten", "undecided")) == (0, True), again.out
