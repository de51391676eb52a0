"""`autotune carry`: what it prints, its JSON, its file, and one line for bad input."""

import json
from pathlib import Path

import pytest
import swept
from called import Command
from lint_recipes import RECIPES

from storage.store import open_store

MIXTRAL, ZERO_2 = RECIPES / "megatron-mixtral.sh", RECIPES / "deepspeed-zero2.json"


@pytest.mark.prove
def test_it_prints_problems_changes_candidates_and_the_recipe(command: Command) -> None:
    answer = command("carry", MIXTRAL, "--from", "dgx-h100:4", "--to", "1x8")
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0].startswith("megatron-mixtral.sh: the described model, from 32 ranks to 8 (1 x 8 of h100")
    assert "global batch 256 (stays)" in lines
    assert any("does not divide the 2 ranks of a stage" in line for line in lines)
    assert "predicted, best first" in lines and "#!/bin/bash" in lines


@pytest.mark.prove
def test_json_and_the_file(command: Command, folder: Path) -> None:
    answer = command("carry", MIXTRAL, "--from", "dgx-h100:4", "--to", "dgx-h100:8", "--json", "--top", 2, "--out", "target.sh")
    found = json.loads(answer.out)
    assert (answer.status, found["batch"], len(found["candidates"])) == (0, {"rule": "fixed", "before": 256, "after": 256}, 2)
    assert found["to"] == {"cluster": "dgx-h100:8", "nodes": 8, "ranks": 64}
    assert (folder / "target.sh").read_text() == found["target"]["text"]


@pytest.mark.prove
def test_a_job(command: Command, folder: Path) -> None:
    with open_store(str(folder / "jobs.db")) as store:
        job = swept.swept(folder, store)
    answer = command("carry", job, "--to", "dgx-h100:1", "--db", folder / "jobs.db", "--json")
    assert answer.status == 0, answer.err
    found = json.loads(answer.out)
    assert (found["format"], found["to"]["ranks"]) == ("best-config", 8)
    assert json.loads(found["target"]["text"])["launch"]["world_size"] == 8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.toml", "--to", "dgx-h100:2"), "none.toml cannot be read"),
        ((MIXTRAL, "--to", "4x8"), "to: 4x8 is a shape of the recipe's cluster, which is not known; give --from"),
        ((MIXTRAL, "--to", "dgx-h9"), "dgx-h9"),
        ((MIXTRAL, "--to", "dgx-h100:2", "--batch", "half"), "batch: 'half' is not known; use fixed or scaled"),
        (
            (ZERO_2, "--to", "dgx-h100:2", "--model", "llama-3.2-1b", "--target-batch-size", "65"),
            "batch: no layout that DeepSpeed's settings can state on 16 ranks divides 65 samples",
        ),
    ],
)
def test_bad_input_is_one_line(command: Command, words: tuple[object, ...], says: str) -> None:
    answer = command("carry", *words)
    assert (answer.status, answer.out) == (2, "")
    assert says in answer.err and answer.err.count("\n") == 1


@pytest.mark.prove
def test_a_batch_that_is_too_small_for_the_ranks_is_what_is_wrong(command: Command, folder: Path) -> None:
    (folder / "titan.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
        "[parallelism]\ntensor_parallel_degree = 8\ndata_parallel_shard_degree = -1\n"
    )
    words = ("carry", "titan.toml", "--from", "dgx-h100:4", "--to", "dgx-h100:16")
    answer = command(*words)
    assert answer.status == 2
    assert "batch: a batch of 4 allows at most 4 data-parallel replicas" in answer.err and "--batch scaled" in answer.err
    assert command(*words, "--batch", "scaled").status == 0
