"""Sweeps of users' own scripts on this machine's cores: without torch, so that a trial takes a second."""

import contextlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from called import Command

from autotune.cli.launch_start import start_once
from autotune.request.rows import request_from_fields
from autotune.session.resolve import prepare
from autotune.session.trial_requests import make_runner
from executor.runners.runner import Runner
from search_spaces.models.command import CommandModel
from search_spaces.placeholders import words_of
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, time
import autotune

batch, accumulate, workers = map(int, sys.argv[1:])
step = (0.004 + 0.002 * batch) * accumulate * (2.0 if workers == 0 else 1.0)
now = 0.0
while True:
    time.sleep(step)
    now += step  # on a clock of its own: no stall of the machine is in it
    autotune.report(samples=batch * accumulate * 2, loss=0.5, clock=now)
"""
WORDS = ("python", "train.py", "{micro_batch_size}", "{gradient_accumulation_steps}", "{workers}")
BRIEF = ("--runner", "local", "--ranks", 2, "--trials", 6, "--trial-seconds", 0.1, "--confirm-repeats", 0, "--strategy", "grid")
RECIPES = {"megatron_lm": "--tensor-model-parallel-size", "torchtitan": "--parallelism.tensor_parallel_degree"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Runner]:
    """What a sweep of a script starts, once for all; the scripts find `autotune` here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        asked = {"command": "python -m train", "ranks": 2, "runner": "local", "strategy": "random"}
        with make_runner(prepare(request_from_fields(asked))) as runner:
            yield runner


@pytest.fixture
def script(folder: Path, ranks: Runner, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a script, and ranks that are there already."""
    for module in ("check", "foreground", "reproduce"):
        monkeypatch.setattr(f"autotune.cli.{module}.make_runner", lambda _: contextlib.nullcontext(ranks))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # torchrun's
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.mark.prove
def test_a_check_says_what_was_understood(script: Path, command: Command) -> None:
    with (script / "train.py").open("a") as more:
        more.write("    open('written.txt', 'w').close()\n")
    words = ("check", "--runner", "local", "--ranks", 2, "--global-batch-size", 8)
    checked = command(*words, "--script-knob", "workers=1,2", "--", *WORDS)
    assert checked.status == 0, checked.err
    step, reads, searched, writes = checked.out.splitlines()
    assert step.startswith("step: OK  loss 0.5; its work is not checked: no training with torch was seen in its processes")
    assert reads == "reads: micro_batch_size, gradient_accumulation_steps, workers"
    assert searched.startswith("searched: micro_batch_size=1,2,4")
    assert writes == f"writes in {script}: nothing; in the trial's folder, which is removed: written.txt"
    assert "write your script's command after --" in command("check", "llama-tiny", *words[1:]).err


def recipe(name: str) -> tuple[list[str], list[str]]:
    """Options and command of the line in an example's README."""
    block = (ROOT / "examples" / name / "README.md").read_text().split("```")[1]
    program, subcommand, *words = shlex.split(block.replace("\\\n", " "))
    assert (program, subcommand) == ("autotune", "sweep")
    at = words.index("--")
    return words[:at], words[at + 1 :]


def test_a_script_is_tuned_as_it_is(script: Path, command: Command) -> None:
    answer = command(
        "sweep", "--engine", "command", *BRIEF, "--script-knob", "workers=0,2", "--parameter-count", "1M", "--", *WORDS
    )
    assert answer.status == 0, answer.err
    assert "train.py on local with 2 ranks" in answer.err
    assert "note: no placeholder of the command carries zero_stage, activation_checkpointing" in answer.err
    best: dict[str, Any] = json.loads((script / "best-config.json").read_text())
    assert (best["engine"], best["model"]["name"]) == ("command", "train.py")
    assert (best["best"]["config"]["micro_batch_size"], best["best"]["config"]["script"]) == (4, "workers=2")
    assert best["baseline"]["gain"]["mean"] > 1.5
    assert best["launch"]["command"].endswith("train.py 4 1 2")
    assert f"launch:\n  {best['launch']['command']}\n  started once: 2 ranks, the first step after " in answer.out
    exported = command("export", "--format", "torchrun")
    script = best["launch"]["command"].partition(" train.py ")[2]
    assert exported.out.splitlines()[-1].endswith(f' train.py {script} "$@"')
    assert "train.py on local" in command("show").out
    assert "workers=2" in command("explain").out


READS_A_FILE = """
import re, sys, time
import autotune

text = open(sys.argv[1]).read()
batch, accumulate = (int(re.search(rf"{name}: (\\d+)", text)[1]) for name in ("train_batch_size", "accumulation_steps"))
now = 0.0
while True:
    step = (0.004 + 0.002 * batch) * accumulate
    time.sleep(step)
    now += step
    autotune.report(samples=batch * accumulate * 2, loss=0.5, clock=now)
"""
WAYS = ("fit", "llama-tiny", "--on", "2x24GB", "--global-batch-size", 16, "--sequence-length", 64, "--methods", "lora")


@pytest.mark.prove
def test_ways_that_fit_are_measured_beside_their_predictions_and_the_fastest_is_written(script: Path, command: Command) -> None:
    (script / "file.py").write_text(READS_A_FILE)
    (script / "sweep.toml").write_text("confirm_repeats = 0\nracing = false\nfidelity = {max_seconds = 0.1}\n")
    measure = ("--measure", 4, "--config", script / "sweep.toml", "--pin", "zero_stage=0")
    answer = command(*WAYS, *measure, "--for", "trl", "--out", "sft.yaml", "--", "python", "file.py", "{file}")
    assert answer.status == 0, answer.err
    assert sorted(path.stem for path in (script / "sft-ways").glob("*.yaml")) == [
        "lora-ddp-4", "lora-ddp-8", "lora-ddp-recomputed-4", "lora-ddp-recomputed-8",
    ]  # fmt: skip
    rows = {line.split()[0]: line.split() for line in answer.out.splitlines() if line.startswith("lora-ddp-")}
    assert all(words[-1] == "ok" for words in rows.values())
    written = (script / "sft.yaml").read_text()
    assert "per_device_train_batch_size: 8" in written
    assert "# measured here: " in written


@pytest.mark.prove
def test_ways_of_an_own_program_are_measured_by_its_placeholders(script: Path, command: Command) -> None:
    (script / "sweep.toml").write_text("confirm_repeats = 0\nracing = false\nfidelity = {max_seconds = 0.1}\n")
    words = ("--measure", 2, "--config", script / "sweep.toml", "--pin", "zero_stage=0", "--json", "--")
    own = ("python", "train.py", "{micro_batch_size}", "{gradient_accumulation_steps}", "1")
    document = json.loads(command(*WAYS, *words, *own).out)
    assert document["fastest"] == "lora-ddp-8"
    assert [row["way"] for row in document["ways"]] == ["lora-ddp-8", "lora-ddp-recomputed-8"]
    assert all(row["measured"]["mean"] > 0 for row in document["ways"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--measure", 2), "command"),
        (("--measure", 2, "--for", "deepspeed"), "{file}"),
        (("--", "python", "train.py"), "give --measure 8"),
        (("--measure", 2, "--cards", "1x4090"), "is for one"),
    ],
)
def test_a_measurement_that_says_not_enough_is_refused(command: Command, words: tuple[object, ...], said: str) -> None:
    answer = command(*WAYS, *words)
    assert answer.status == 2
    assert said in answer.err


SPAWNS = """
import sys, torch
import torch.distributed as dist
from torch import multiprocessing, nn

def train(rank, port, batch):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    while True:
        for _ in range(3):
            with model.no_sync():
                model(torch.randn(batch, 8)).square().mean().backward()
        model(torch.randn(batch, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    multiprocessing.spawn(train, (PORT, int(sys.argv[1])), nprocs=2)
"""


@pytest.mark.prove
def test_a_script_that_starts_its_ranks_itself_has_the_samples_of_all_and_is_started_as_it_is(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # the launch line's `python`
    (folder / "train.py").write_text(SPAWNS.replace("PORT", str(free_port())))
    one = ("--runner", "local", "--ranks", 1, "--trial-seconds", 0.1, "--confirm-repeats", 0, "--pin", "micro_batch_size=2")
    answer = command("sweep", *one, "--", "python", "train.py", "{micro_batch_size}")
    assert answer.status == 0, answer.err
    best = json.loads((folder / "best-config.json").read_text())
    assert "16 samples a step in 4 micro-batches on 2 ranks that train together" in answer.out + answer.err
    assert "state --global-batch-size 16" in answer.out + answer.err
    assert best["launch"]["command"] == "python train.py 2"
    assert "started once: the first step after" in answer.out


@pytest.mark.prove
def test_what_was_found_is_verified_by_a_script(script: Path, command: Command) -> None:
    one = ("--pin", "micro_batch_size=1,2", "--script-knob", "workers=2")
    answer = command("sweep", *BRIEF, *one, "--", *WORDS)
    assert answer.status == 0, answer.err
    refused = command("verify", "best-config.json", "--engine", "native")
    assert (refused.status, "native does not run the script that was tuned; use command" in refused.err) == (2, True)
    best = json.loads((script / "best-config.json").read_text())
    for wrong, line in {
        "--nproc-per-node=1": "WRONG: the line starts 1 ranks, and the trials had 2",
        "--nproc-per-node=2 --no-such-option": "WRONG: the line ended with code 2: torchrun: error: ",
        "--nproc-per-node=2 --no-python": "WRONG: the line ended with code 1: ",
    }.items():
        other = best["launch"]["command"].replace("--nproc-per-node=2", wrong)
        assert start_once({**best, "launch": {**best["launch"], "command": other}}).startswith(line)
    verified = command("verify", "best-config.json", "--engine", "command", "--rounds", 1)
    assert verified.status == 0, verified.err
    assert "on command: " in verified.out
    other = command("verify", "best-config.json", "--engine", "command", "--rounds", 1, "--json", "--", *WORDS[:-1], "2")
    assert other.status == 0, other.err
    assert json.loads(other.out)["left_out"] == ["script=workers=2"]


def test_a_script_that_measures_nothing_reaches_the_terminal_with_the_remedy(script: Path, command: Command) -> None:
    (script / "train.py").write_text("import sys\nsys.exit(0)\n")
    answer = command("sweep", *BRIEF, "--pin", "micro_batch_size=1", "--", "python", "train.py", "{micro_batch_size}")
    assert answer.status == 1
    assert "the script exited with code 0 without a measurement; call autotune.report(samples=…)" in answer.err


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_as_its_readme_says(script: Path, command: Command, name: str) -> None:
    options, words = recipe(name)
    brief = ("--trials", 3, "--trial-seconds", 0.1, "--confirm-repeats", 0, "--no-racing", "--folder", ROOT)
    answer = command("sweep", *options, *brief, "--", *words)
    assert answer.status == 0, answer.err
    assert answer.err.count(": OK ") == 3, answer.err
    assert RECIPES[name] in json.loads((script / "best-config.json").read_text())["launch"]["command"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_configuration_of_a_recipe_is_a_command_that_its_script_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, words = recipe(name)
    asked = {"command": words, "ranks": 2, "global_batch_size": 16, "space": "3d", "strategy": "random"}
    session = prepare(request_from_fields(asked))
    assert isinstance(session.model, CommandModel)
    assert len(session.space.domains["tensor_parallel_size"]) == 2
    at = next(place for place, word in enumerate(words) if word.endswith(".py"))
    main, none = script_main(ROOT / words[at]), ["--train-iters", "0"] if name == "megatron_lm" else ["--training.steps", "0"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    lines = set()
    for config in session.space.enumerate():
        filled = words_of(session.model, config, session.request.workload, 2, {})
        monkeypatch.setattr(sys, "argv", [*filled[at:], *none])
        main()
        lines.add(filled)
    assert len(lines) == session.space.count()  # none is another one's


def script_main(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--", "torchrun", "train.py"), "torchrun would start its own ranks on each rank"),
        (("--", "python", "train.py", "{micro_batch}"), "did you mean micro_batch_size?"),
        (("--pattern", "x"), "pattern: requires a command; write the command after --"),
        (("llama-tiny", "--", "python", "train.py"), "model: is determined by the command"),
        (("--script-knob", "workers", "--", "python", "train.py"), "'workers' is not NAME=VALUES"),
        (("--parameter-count", "many", "--", "python", "train.py"), "'many' is not a number of parameters"),
        (("--engine", "command"), "model: is missing; give a preset, a config.json or module:factory, or a command"),
    ],
)
def test_bad_input_is_one_line(folder: Path, command: Command, words: tuple[str, ...], line: str) -> None:
    answer = command("sweep", *words)
    assert (answer.status, answer.out) == (2, "")
    assert line in answer.err
    assert len(answer.err.splitlines()) == 1
    assert not (folder / "jobs.db").exists()
