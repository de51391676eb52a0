"""`autotune dry-run`: any cluster, any layout, users' modules; bad input is one line and starts nothing."""

import json
from pathlib import Path

import pytest
from called import Command

from autotune.cli import dry_run
from executor.runners import rank_process
from search_spaces.trial import CollectiveCount, DryRank, DryRun

pytestmark = pytest.mark.usefixtures("forked_ranks")

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))

    def forward(self, x):
        return self.layers(x).square().mean()

def batch(size, generator):
    return {"x": torch.randn(size, 8, generator=generator)}

def build():
    return Net(), batch
"""
LAYOUT = ("--pin", "tensor_parallel_size=2", "--pin", "pipeline_parallel_size=2", "--pin", "zero_stage=1")


@pytest.mark.nightly
def test_a_pipeline_on_a_cluster_that_is_not_here(command: Command) -> None:
    answer = command("dry-run", "config.json", "--cluster", "dgx-a100", *LAYOUT, "--sequence-length", 32, "--json")
    assert answer.status == 0, answer.err
    document = json.loads(answer.out)
    assert (document["world_size"], document["backend"], document["fits"]) == (8, "nccl", True)
    assert [rank["stages"] for rank in document["ranks"]] == [[0], [1]]
    assert all(rank["micro_batches"] == 4 for rank in document["ranks"])
    for rank in document["ranks"]:
        assert sum(rank["memory_by_tag"].values()) == rank["peak_memory_bytes"] <= document["peak_memory_bytes"]
        sent = {(each["mesh_dimension"], each["operation"]) for each in rank["collectives"]}
        assert {("pipeline", "send"), ("tensor", "all_reduce"), ("data", "reduce_scatter")} <= sent


@pytest.mark.prove
def test_a_module_of_ones_own(command: Command, folder: Path) -> None:
    (folder / "dry_net.py").write_text(FACTORY)
    answer = command("dry-run", "dry_net:build", "--ranks", 2, "--pin", "zero_stage=3", "--pin", "micro_batch_size=4", "--json")
    assert answer.status == 0, answer.err
    (rank,) = json.loads(answer.out)["ranks"]
    product = 2 * 4 * 8 * 8
    # No gradient is asked for of the input, so that the first layer's backward is one product.
    assert rank["flops_per_step"] == 8 * product
    assert {each["operation"] for each in rank["collectives"]} == {"all_gather", "reduce_scatter", "all_reduce"}


def test_the_table(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = CollectiveCount(operation="all_reduce", mesh_dimension="data", count=2, bytes=3 * 2**20)
    tags = {"parameters": 2**30, "gradients": 0, "optimizer_state": 2**30, "activations": 2**30, "buffers": 0}
    rank = DryRank(
        rank=0, coordinates={}, stages=(0, 1), micro_batches=1, peak_memory_bytes=3 * 2**30, memory_by_tag=tags,
        tag_peak_bytes=tags, host_memory_bytes=0, flops_per_step=2 * 10**12, collectives=(sent,),
    )  # fmt: skip
    monkeypatch.setattr(dry_run, "dry_run_model", lambda *_, **__: DryRun(ranks=(rank,), backend="gloo", seconds=1.0))
    answer = command("dry-run", "config.json", "--cluster", "dgx-a100", "--pin", "zero_stage=2", "--sequence-length", 32)
    assert answer.status == 0, answer.err
    start = next(at for at, line in enumerate(answer.out.splitlines()) if at and not line.startswith(" "))
    assumed, lines = answer.out.splitlines()[:start], [line.split() for line in answer.out.splitlines()[start:]]
    assert assumed[0] == "assumed, because it was not stated:"
    names = {line.split("=")[0].strip() for line in assumed[1:-1]}
    assert names == {"global_batch_size", "micro_batch_size", "activation_checkpointing", "precision"}
    assert lines[2][:4] == ["rank", "stages", "peak", "of"]
    assert lines[3][:6] == ["0", "0,", "1", "3", "GiB", "3.8%"]
    assert lines[3][-1] == "2"
    assert lines[5] == ["0", "data", "all_reduce", "2", "3", "MiB"]
    assert answer.out.splitlines()[-1].startswith("peak of 3 GiB fits into the 79.2 GiB of a100-80gb; dry run of 1 of 8")


BAD = {
    "": ("model: is missing; give a preset",),
    "config.json --pin zero_stage=2,3": ("zero_stage: 2,3 is not one value", "write zero_stage=VALUE"),
    "config.json --pin tensor_parallel_size=3 --ranks 3": ("3 ranks do not divide", "choose a tensor_parallel_size"),
    "config.json --engine fsdp3": ("engine: 'fsdp3' is not known",),
    "config.json --cluster dgx-a1000": ("dgx-a1000: no cluster preset",),
    "gpt2 --sequence-length 1025": ("sequence_length: 1025", "give at most 1024"),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_and_starts_nothing(command: Command, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a rank process was started")

    monkeypatch.setattr(rank_process.RankProcess, "__init__", started)
    answer = command("dry-run", *words.split())
    lines = answer.err.splitlines()
    assert (answer.status, answer.out, len(lines)) == (2, "", 1), answer.err
    for part in BAD[words]:
        assert part in lines[0]


def test_what_fits_with_shorter_samples_than_the_assumed_ones_is_not_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = {"parameters": 2**30, "gradients": 2**30, "optimizer_state": 2**30, "activations": 90 * 2**30, "buffers": 0}
    rank = DryRank(
        rank=0, coordinates={}, stages=(0,), micro_batches=1, peak_memory_bytes=93 * 2**30, memory_by_tag=tags,
        tag_peak_bytes=tags, host_memory_bytes=0, flops_per_step=2 * 10**12, collectives=(),
    )  # fmt: skip
    monkeypatch.setattr(dry_run, "dry_run_model", lambda *_, **__: DryRun(ranks=(rank,), backend="gloo", seconds=1.0))
    words = ("dry-run", "config.json", "--cluster", "dgx-a100")
    assumed, stated = command(*words), command(*words, "--sequence-length", 32)
    assert (assumed.status, stated.status) == (0, 3)
    assert "peak of 93 GiB with samples of the assumed length does not fit into the 79.2 GiB" in assumed.out
    assert "sequence_length=" in assumed.out and "93 GiB does not fit into" in stated.out
