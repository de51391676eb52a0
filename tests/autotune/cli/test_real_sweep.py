"""A real sweep on this machine's cores, and all that can be asked of it afterwards."""

import gzip
import json
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from called import Answer, Command

from autotune.frameworks.best_config import SCHEMA_PATH

pytestmark = pytest.mark.usefixtures("forked_ranks")

SWEEP = (
    "sweep", "llama-tiny", "--runner", "local", "--trials", 3, "--trial-seconds", 0.2, "--confirm-repeats", 1,
    "--global-batch-size", 4, "--sequence-length", 32, "--seed", 1, "--no-racing",
)  # fmt: skip


@pytest.fixture
def swept(command: Command) -> Answer:
    """The answer of a sweep; `best-config.json` and `jobs.db` are in the current folder."""
    return command(*SWEEP)


def test_a_sweep_and_what_follows(swept: Answer, command: Command, folder: Path) -> None:
    """One sweep for all of it, since each start of ranks takes seconds."""
    assert swept.status == 0
    assert " of 3 trials" in swept.out
    assert "written to best-config.json (job " in swept.out
    lines = swept.err.splitlines()
    assert lines[0].endswith("llama-tiny on local with 2 ranks, space zero (16 configurations), 3 trials by guided")
    assert sum(line.startswith("trial ") and ": OK  " in line for line in lines) >= 5  # 3, and one round of the finalists
    best = json.loads((folder / "best-config.json").read_text())
    jsonschema.validate(best, json.loads(SCHEMA_PATH.read_text()))

    _show(command, best)
    _export(command, best, folder)
    _jobs_and_clean(command, best)


@pytest.mark.prove
def test_the_best_is_measured_again(swept: Answer, command: Command, folder: Path) -> None:
    assert swept.status == 0
    _reproduce(command, json.loads((folder / "best-config.json").read_text()))


@pytest.mark.prove
def test_a_recipe_is_guarded(swept: Answer, command: Command, folder: Path) -> None:
    """Five equal runs; then the history says that the step once took a tenth of its time."""
    words = ("guard", "best-config.json", "--against", "history.jsonl", "--trials", 2, "--tolerance", 3.0)
    first = command(*words, "--record", "--json")
    assert (swept.status, first.status) == (0, 0)
    document = json.loads(first.out)
    assert (document["runs"], document["slowdown"]) == (0, None)
    run = document["now"]
    assert sum(run["parts"][0].values()) > 0
    assert any(name.startswith("compute aten::") and counts == [counts[0]] * 2 for name, (counts, _) in run["calls"].items())
    assert json.loads((folder / "history.jsonl").read_text()) == run
    fast = {**run, **{name: [value / 10 for value in run[name]] for name in ("seconds", "calm_seconds")}}
    fast["parts"] = [{part: value / 10 for part, value in parts.items()} for parts in run["parts"]]
    Path("history.jsonl").write_text("".join(f"{json.dumps(fast)}\n" for _ in range(4)))
    slower = command(*words, "--junit", "guard.xml")
    assert slower.status == 1
    assert slower.out.startswith("REGRESSION: ")
    assert '<failure message="REGRESSION: ' in (folder / "guard.xml").read_text()
    for words_after, text in (
        (("--record",), "record: . is a folder, which has no history"),
        ((), "against: . is a folder, and the recipe is no script"),
    ):  # fmt: skip
        answer = command("guard", "best-config.json", "--against", ".", *words_after)
        assert (answer.status, answer.out, text in answer.err) == (2, "", True), answer.err


SCRIPT = """
import time
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1000):
    time.sleep({pause})
    model(torch.ones({{micro_batch_size}}, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.prove
def test_a_script_is_guarded_against_another_checkout(command: Command, folder: Path) -> None:
    """The other folder's steps wait for half as long."""
    for name, pause in (("ours", 0.02), ("theirs", 0.01)):
        (folder / name).mkdir()
        text = SCRIPT.format(pause=pause).replace("{micro_batch_size}", "int(__import__('sys').argv[1])")
        (folder / name / "train.py").write_text(text)
    os.chdir(folder / "ours")
    swept = command(
        "sweep", "--ranks", 1, "--runner", "local", "--global-batch-size", 4, "--pin", "micro_batch_size=4", "--trials", 1,
        "--confirm-repeats", 1, "--", "python", "train.py", "{micro_batch_size}",
    )  # fmt: skip
    assert swept.status == 0, swept.err
    words = ("guard", "best-config.json", "--trials", 4, "--json", "--against")
    slower, equal = command(*words, "../theirs"), command(*words, ".")
    document = json.loads(slower.out)
    assert (slower.status, document["regression"], document["folder"], document["runs"]) == (1, True, "../theirs", 4)
    assert 0.5 < document["slowdown"]["mean"] < 1.5
    assert abs(json.loads(equal.out)["slowdown"]["mean"]) < 0.2


def _show(command: Command, best: dict[str, Any]) -> None:
    shown = command("show")
    assert (shown.status, shown.err) == (0, "")
    assert f"job {best['job']['id']}: succeeded (BUDGET), llama-tiny on local with 2 ranks, 3 trials" in shown.out
    assert re.search(r"★ \d", shown.out)
    document = json.loads(command("show", best["job"]["id"][:-2], "--json").out)
    assert [trial["number"] for trial in document["trials"]] == list(range(len(document["trials"])))
    assert document["best_config"]["best"] == best["best"]


def _export(command: Command, best: dict[str, Any], folder: Path) -> None:
    assert json.loads(command("export").out)["best"] == best["best"]
    exported = command("export", "--format", "deepspeed", "--out", "ds.json")
    assert (exported.status, exported.out) == (0, "")
    deepspeed = json.loads((folder / "ds.json").read_text())
    assert deepspeed["zero_optimization"]["stage"] == best["best"]["config"]["zero_stage"]
    assert deepspeed["train_batch_size"] == 4


def _reproduce(command: Command, best: dict[str, Any]) -> None:
    """A machine that is busy may be outside the interval; then the status tells it."""
    again = command("reproduce", "best-config.json", "--trace", "traces", "--json")
    document = json.loads(again.out)
    assert again.status == (0 if document["inside"] else 1)
    assert document["stated"]["mean"] == best["best"]["measured"]["samples_per_second"]["mean"]
    assert len(document["rates"]) == 1
    assert "traces of one step: traces/rank-*.json.gz; open them in Perfetto" in again.err
    for rank in range(2):
        events = json.loads(gzip.decompress(Path("traces", f"rank-{rank}.json.gz").read_bytes()))["traceEvents"]
        products = [event for event in events if event.get("name") == "aten::mm"]
        assert any(event["args"]["Input Dims"][0] for event in products)
        assert sum(event["dur"] for event in products) > 0  # microseconds
    refused = command("reproduce", "best-config.json", "--trace", "best-config.json/traces")
    assert (refused.status, refused.out, len(refused.err.splitlines())) == (2, "", 1)
    assert "trace: best-config.json/traces is no folder (Not a directory); give a folder that can be written" in refused.err


def _jobs_and_clean(command: Command, best: dict[str, Any]) -> None:
    job = best["job"]["id"]
    assert [row["id"] for row in json.loads(command("jobs", "--json").out)] == [job]
    resumed = command("sweep", "--resume", job)
    assert (resumed.status, len(resumed.err.splitlines())) == (2, 1)
    assert "has ended" in resumed.err
    assert "would remove" in command("clean", job).err
    assert command("clean", "--all", "--yes").status == 0
    assert json.loads(command("jobs", "--json").out) == []


@pytest.mark.prove
def test_json_is_one_document_and_a_file_gives_the_options(command: Command, folder: Path) -> None:
    (folder / "sweep.toml").write_text(
        'model = "config.json"\nrunner = "local"\ntrials = 9\nglobal-batch-size = 4\nsequence_length = 32\n'
        "confirm_repeats = 0\n[fidelity]\nmax_seconds = 0.1\n[pins]\nzero_stage = [1, 2]\n"
    )
    (folder / "baseline.json").write_text('{"zero_stage": 2, "micro_batch_size": 2}')
    answer = command(
        "sweep", "--config", "sweep.toml", "--trials", 1, "--baseline", "baseline.json", "--json", "--out", "b.json"
    )
    assert (answer.status, answer.err) == (0, "")
    document = json.loads(answer.out)
    assert document["state"] == "SUCCEEDED"
    assert document["best_config"] == json.loads((folder / "b.json").read_text())
    config = document["best_config"]["best"]["config"]
    assert (config["zero_stage"], config["micro_batch_size"]) == (2, 2)


@pytest.mark.nightly
def test_a_limit_below_every_real_peak_is_nothing_feasible(command: Command, folder: Path) -> None:
    """Above what the states alone need, so that trials run and prove it."""
    answer = command(
        "sweep", "config.json", "--runner", "local", "--trials", 2, "--strategy", "grid", "--memory-limit", 900_000,
        "--trial-seconds", 0.1, "--pin", "zero_stage=3", "--pin", "micro_batch_size=4",
    )  # fmt: skip
    assert (answer.status, answer.out) == (3, "")
    assert "2 INFEASIBLE" in answer.err
    assert "raise the memory limit" in answer.err.splitlines()[-1]
    assert not (folder / "best-config.json").exists()
    with sqlite3.connect(folder / "jobs.db") as connection:
        assert connection.execute("select count(*) from jobs").fetchone() == (1,)
    connection.close()
    assert command("export").status == 1
