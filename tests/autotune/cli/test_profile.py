"""`autotune profile`: its rows add up, its FLOPs are those that a trial counts, bad input is one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from called import Command

from autotune.cli.profile import OWN, rows_of
from executor.measurement.flops import ModelProfile, ModuleCost, Phases
from executor.runners import rank_process
from executor.runners.local import LocalRunner
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial import Fidelity, TrialRequest, Workload
from search_spaces.trial_config import TrialConfig

pytestmark = pytest.mark.usefixtures("forked_ranks")

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.head(self.layers(x)).square().mean()

def build():
    return Net(), lambda size, generator: {"x": torch.randn(size, 8, generator=generator)}

class Refuses(Net):
    def forward(self, x):
        raise ValueError("no such path")

def refuses():
    return Refuses(), lambda size, generator: {"x": torch.randn(size, 8, generator=generator)}
"""


def cost(name: str, kind: str, amount: int, parameters: int = 0) -> ModuleCost:
    spent = Phases(forward=amount, backward=2 * amount, recompute=0)
    return ModuleCost(name=name, kind=kind, calls=1, parameters=parameters, flops=spent, seconds=spent)


def made() -> ModelProfile:
    blocks = [
        item
        for n in range(3)
        for item in (cost(f"blocks.{n}", "Block", n + 1), cost(f"blocks.{n}.mlp", "Linear", 10 * (n + 1), parameters=5))
    ]
    other = [cost("blocks.3", "Other", 4)]
    modules = (cost("", "Net", 1), cost("blocks", "ModuleList", 0), *blocks, *other, cost("head", "Linear", 7, parameters=2))
    return ModelProfile(
        modules=modules, outside_flops=0, outside_seconds=5.0, micro_batches=1, step_seconds=1.0, hooked_seconds=239.0,
        repeats=1, environment={},
    )  # fmt: skip


def test_blocks_that_are_alike_are_one_row_with_their_sum() -> None:
    rows = rows_of(made(), depth=None, merge=True)
    assert [(row.depth, row.label, row.count) for row in rows] == [
        (0, "model", 1), (1, OWN, 1), (1, "blocks.0-2", 3), (2, OWN, 3), (2, "mlp", 3), (1, "blocks.3", 1), (1, "head", 1),
    ]  # fmt: skip
    blocks, own, mlp = rows[2:5]
    assert (blocks.name, mlp.name) == ("blocks.0-2", "blocks.0-2.mlp")
    assert (own.seconds.forward, mlp.seconds.forward, blocks.seconds.forward) == (6, 60, 66)
    assert (blocks.parameters, rows[0].parameters) == (15, 17)


def test_every_block_and_depth() -> None:
    labels = [row.label for row in rows_of(made(), depth=1, merge=False)]
    assert labels == ["model", OWN, "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
    assert [row.label for row in rows_of(made(), depth=0, merge=True)] == ["model"]


def require_sums(rows: list[dict[str, Any]]) -> None:
    """What is one level below a row, its own included, sums to it."""
    for at, row in enumerate(rows):
        inside = []
        for later in rows[at + 1 :]:
            if later["depth"] <= row["depth"]:
                break
            inside += [later] if later["depth"] == row["depth"] + 1 else []
        if inside:
            assert sum(each["parameters"] for each in inside) == row["parameters"]
            for phase in ("forward", "backward", "recompute"):
                assert sum(each["flops"][phase] for each in inside) == row["flops"][phase]
                assert sum(each["seconds"][phase] for each in inside) == pytest.approx(row["seconds"][phase])


@pytest.fixture
def profiled(command: Command) -> Any:
    def run(*words: object) -> dict[str, Any]:
        answer = command("profile", *words, "--json")
        assert answer.status == 0, answer.err
        document: dict[str, Any] = json.loads(answer.out)
        rows = document["modules"]
        require_sums(rows)
        whole = sum(rows[0]["seconds"].values()) + document["outside"]["seconds"]
        assert whole == pytest.approx(document["hooked_seconds"])
        assert document["flops"] == sum(rows[0]["flops"].values())
        return document

    return run


@pytest.mark.nightly
def test_a_profile_counts_what_a_trial_counts(profiled: Any) -> None:
    knobs = {"activation_checkpointing": "full", "micro_batch_size": 2}
    pins = [word for name, value in knobs.items() for word in ("--pin", f"{name}={value}")]
    document = profiled("config.json", *pins, "--global-batch-size", 4, "--sequence-length", 32)
    model = resolve_model("config.json")
    assert document["modules"][0]["parameters"] == model.parameter_count
    assert document["micro_batches"] == 2
    assert document["modules"][0]["flops"]["recompute"] > 0
    request = TrialRequest(
        attempt="a", model=model, config=TrialConfig().replace(knobs), world_size=2, peak_flops_per_device=1e9,
        workload=Workload(global_batch_size=4, sequence_length=32), fidelity=Fidelity(max_seconds=0.1, max_steps=5),
    )  # fmt: skip
    with LocalRunner(2, device="cpu") as runner:
        result = runner.run(request)
    assert result.hardware_tflops_per_device is not None
    assert result.hfu == pytest.approx(result.hardware_tflops_per_device * 1e3)
    assert result.mfu is not None
    assert result.hfu > result.mfu
    seconds = sum(result.step_seconds) / len(result.step_seconds)
    assert 2 * result.hardware_tflops_per_device * 1e12 * seconds == pytest.approx(document["flops"])


@pytest.mark.prove
def test_a_module_of_ones_own(profiled: Any, folder: Path) -> None:
    (folder / "own_net.py").write_text(FACTORY)
    document = profiled("own_net:build", "--pin", "micro_batch_size=4")
    rows = {row["name"]: row for row in document["modules"] if not row["own"]}
    assert rows["layers.0-2"]["count"] == 3
    assert rows["layers.0-2"]["parameters"] == 3 * 64
    product = 2 * 4 * 8 * 8
    # No gradient is asked for of the input, so that the first layer's backward is one product.
    assert rows["layers.0-2"]["flops"] == {"forward": 3 * product, "backward": 5 * product, "recompute": 0}


@pytest.mark.prove
def test_the_table(command: Command) -> None:
    answer = command("profile", "config.json", "--pin", "activation_checkpointing=full", "--sequence-length", 32, "--depth", 2)
    assert answer.status == 0, answer.err
    lines = answer.out.splitlines()
    assert lines[0].split(": ")[1].startswith("106,816 parameters, fp32, 1 micro-batch of 1 x 32 tokens, on ")
    units = next(line for line in lines if line.startswith("module")).split()[2:]
    assert units == ["MFLOP", "MFLOP", "MFLOP", "ms", "ms", "ms", "%"]
    assert not any("…" in line for line in lines)
    assert any(line.startswith("  blocks.0-1 (x2) ") for line in lines)
    assert " total = forward " in lines[-2]
    assert lines[-1].startswith("a step without the profiler's hooks takes ")


@pytest.mark.prove
def test_what_a_users_module_raises_is_told_with_its_traceback(command: Command, folder: Path) -> None:
    (folder / "own_net.py").write_text(FACTORY)
    answer = command("profile", "own_net:refuses")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("autotune: ValueError: no such path")
    assert "own_net.py" in answer.err


BAD = {
    "": ("model: is missing; give a preset",),
    "llama-9b": ("llama-9b: no model preset", "did you mean"),
    "llama-3.1-405b": ("model: the states of llama-3.1-405b", "choose a smaller model"),
    "config.json --pin zero_stage=2,3": ("zero_stage: 2,3 is not one value", "write zero_stage=VALUE"),
    "config.json --pin zero_stage=7": ("zero_stage: 7", "give 0, 1, 2 or 3"),
    "config.json --pin bogus=1": ("bogus: no knob has this name",),
    "config.json --pin tensor_parallel_size=2": ("tensor_parallel_size: 2 ranks would divide", "leave it at 1"),
    "config.json --pin micro_batch_size=3 --global-batch-size 4": ("micro_batch_size=3", "; "),
    "config.json --depth -1": ("depth: '-1' is not at least 0", "see `autotune profile --help`"),
    "config.json --sequence-length 0": ("sequence_length: '0' is not a length", "write a number of tokens"),
    "gpt2 --sequence-length 1025": ("sequence_length: 1025", "give at most 1024"),
    "config.json --data-path none": ("data_path: ", "does not exist; give"),
    "config.json --timeout 0": ("trial_timeout: 0.0", "give seconds above 0"),
}  # fmt: skip


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_and_starts_nothing(command: Command, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a rank process was started")

    monkeypatch.setattr(rank_process.RankProcess, "__init__", started)
    answer = command("profile", *words.split())
    lines = answer.err.splitlines()
    assert (answer.status, answer.out, len(lines)) == (2, "", 1), answer.err
    for part in BAD[words]:
        assert part in lines[0]
