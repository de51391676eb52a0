"""`make gpu` skips where there is no GPU, needs torch, NumPy and SciPy alone, and its proofs go through on a CPU."""

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    bundle,
    by_hand,
    design,
    float8,
    graphs,
    grid,
    kernels,
    memory,
    one_rank,
    packing,
    pair,
    sweep,
    windows,
)
from benchmarks.gpu.baseline import Llama
from benchmarks.gpu.lines import Line, State
from benchmarks.gpu.models import SMALL, model_of
from benchmarks.gpu.proof import Item, Proof, Setting, ratio
from executor.engines.native.buckets import GradientReducer
from executor.parallel.collectives import InFlight, ProcessGroup
from executor.parallel.model import build_transformer
from search_spaces.knobs.computation import FP8_RECIPES
from search_spaces.models.huggingface import model_spec_from_config
from search_spaces.trial_config import TrialConfig

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "executor" / "engines" / "native" / "stand_ins"

ALONE = """
import importlib.abc, sys
allowed = {"torch", "numpy", "scipy", "setuptools", "pkg_resources", "executor", "search_spaces", "autotune", "storage",
           "benchmarks", *sys.stdlib_module_names}
class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        first, importer = name.partition(".")[0], sys._getframe(1)
        # What torch itself imports is there where torch is.
        while importer is not None and importer.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
            importer = importer.f_back
        by = importer.f_globals.get("__name__", "").partition(".")[0]
        if first not in allowed and by in ("executor", "search_spaces", "autotune", "storage", "benchmarks", "__main__"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Forbid())
import benchmarks.gpu.__main__, benchmarks.gpu.rank, benchmarks.gpu.capacity, executor.runners.rank_loop, executor.trial.run
assert "sqlalchemy" not in sys.modules
allowed |= BUNDLED
import autotune.cli.app, autotune.cli.sweep, autotune.cli.calibrate, benchmarks.gpu.calibrated
"""


pytestmark = pytest.mark.nightly


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(device=torch.device("cpu"), size="small", folder=tmp_path)
    yield made
    made.close()


def show(item: Item, setting: Setting) -> Proof:
    """Run an item as a worker does, and keep its result for later ones."""
    proof = Proof(setting)
    item.show(proof)
    line = Line(part="", item=item.name, state=proof.state, values=proof.values)
    setting.known = {**setting.known, **{(part, item.name): line for part in command.PARTS}}
    return proof


def only(items: list[Item], name: str) -> Item:
    (found,) = (item for item in items if item.name == name)
    return found


def failed(proof: Proof) -> list[str]:
    return [claim.text for claim in proof.claims if claim.state is State.FAILS]


def test_imports_no_more_than_torch_numpy_and_scipy_and_the_command_line_no_more_than_the_bundle() -> None:
    modules = {name.replace("-", "_") for name in bundle.PACKAGES} | {"markdown_it", "yaml"}
    script = ALONE.replace("BUNDLED", repr(modules))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_bundle_is_of_the_lock_with_hashes() -> None:
    text = bundle.locked()
    assert [line.partition("==")[0] for line in text.splitlines() if "==" in line] == list(bundle.PACKAGES)
    assert text.count("--hash=sha256:") >= len(bundle.PACKAGES)


def test_without_the_bundle_the_sweep_is_not_run(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sweep.sys, "version_info", (3, 12, 3))
    setting.bundle = setting.folder / "absent"
    proof = show(only(sweep.items(), sweep.CALIBRATION), setting)
    assert proof.state is State.NOT_RUN
    assert "make gpu-bundle" in proof.claims[0].text
    setting.known = {}
    assert show(only(sweep.items(), sweep.WINNER), setting).state is State.NOT_RUN


def test_the_model_of_the_sweep_is_that_of_the_grid() -> None:
    for size in ("small", "large"):
        spec = model_of(size)
        assert dataclasses.replace(model_spec_from_config(sweep.hugging_face(spec), "any"), name=spec.name) == spec


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run `make gpu`")
def test_skips_with_a_reason_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--part", "grid"])
    assert command.main() == 0
    assert capsys.readouterr().out.startswith("skipped: torch")


def test_names_of_items_are_theirs_alone(setting: Setting) -> None:
    for size, device in (("small", "cpu"), ("large", "cuda")):
        setting.size, setting.device = size, torch.device(device)
        for part, items in command.PARTS.items():
            names = [item.name for item in items(setting)]
            assert len(names) == len(set(names)), part


def test_the_design_has_every_pair_of_values_early() -> None:
    space = design.space_of("large")
    knobs = tuple(space.domains)
    legal = set[design.Pair]().union(*(design.pairs_of(config, knobs) for config in space.enumerate()))
    points = design.screening(space, design.POINTS["large"])
    assert len(set(points)) == design.POINTS["large"]
    assert legal == set[design.Pair]().union(*(design.pairs_of(config, knobs) for config in points[:20]))
    assert design.screening(space, 20) == points[:20]


def test_a_point_of_the_grid_is_predicted_before_it_is_measured(setting: Setting, forked_ranks: None) -> None:
    items = grid.items(setting)[:3]
    assert [item.name.partition(":")[0] for item in items] == ["dry run", "predicted", "measured"]
    dry, predicted, measured = (show(item, setting).values for item in items)
    assert dry["peak"] == pytest.approx(measured["peak"], rel=0.02)
    assert predicted["peak"]["low"] < measured["peak"] < predicted["peak"]["high"]
    assert measured["outcome"] == "OK"
    assert list(grid.measured_rates(setting.known)) == [items[2].name.removeprefix("measured: ")]


def test_collectives_over_one_rank(setting: Setting) -> None:
    items = one_rank.items()
    assert show(items[0], setting).state is State.HOLDS
    proof = show(only(items, "one rank: stage 3"), setting)
    assert failed(proof) == []
    assert "42 collectives were sent" in proof.claims[-1].text


def test_a_collective_that_sends_something_else_fails_its_proof(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = ProcessGroup.all_gather

    def shifted(self: ProcessGroup, rows: torch.Tensor, shard: torch.Tensor) -> InFlight:
        gather(self, rows, shard).wait()
        rows += 1
        return InFlight(lambda: None)

    monkeypatch.setattr(ProcessGroup, "all_gather", shifted)
    proof = show(one_rank.items()[0], setting)
    assert "wrong are all_gather of torch.float32" in failed(proof)[0]


def test_memory_foretold_and_accounted_for(setting: Setting) -> None:
    items = memory.items(setting)
    assert len([item for item in items if item.name.startswith("memory: ")]) == 6
    show(only(items, "dry run: stage 3"), setting)
    proof = show(only(items, "memory: stage 3"), setting)
    assert [claim.state for claim in proof.claims] == [State.HOLDS, State.HOLDS]


def test_what_an_earlier_item_has_not_found_is_no_failure(setting: Setting) -> None:
    names = ("memory: plain", "losses: native", "two ranks: tensor 2", "two ranks: checkpointing")
    states = [show(only(command.PARTS["correctness"](setting), name), setting).state for name in names]
    assert states == [State.NOT_RUN] * len(names)


def test_out_of_memory_in_backward_leaves_nothing(setting: Setting, forked_ranks: None) -> None:
    proof = show(only(memory.items(setting), "out of memory in backward"), setting)
    assert failed(proof) == []
    assert len(proof.claims) == 4


@pytest.mark.parametrize("item", [packing.item(), windows.item()], ids=["packing", "windows"])
def test_flex_attention_equals_a_mask(item: Item, setting: Setting) -> None:
    proof = show(item, setting)
    assert failed(proof) == []
    assert len(proof.claims) >= 4


def test_kernels_that_are_not_there_are_skipped_with_the_reason(setting: Setting) -> None:
    assert only(kernels.items(setting), "kernels: liger").skipped.startswith("fused-kernels-device: ")


def test_losses_by_kernels_are_held_against_those_without(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """By packages that stand in for the real ones."""
    monkeypatch.setattr("executor.parallel.fused.kernel_refusals", lambda *_: [])
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in kernels.PACKAGES:
        proof = Proof(setting)
        kernels.prove_losses(proof, name)
        assert [claim.state for claim in proof.claims] == [State.HOLDS, State.HOLDS]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("liger_kernel", "transformer_engine")]:
        del sys.modules[name]


def test_products_in_8_bits_lose_as_much_as_bf16(setting: Setting, forked_ranks: None) -> None:
    proof = show(only(float8.items(setting), "float8: eager blocks"), setting)
    assert failed(proof) == []
    assert proof.claims[-1].state is State.HOLDS


def test_every_recipe_of_8_bits_is_held_against_bf16_or_skipped_with_its_reason(setting: Setting) -> None:
    found = {name.partition(": ")[2]: (show, skipped) for name, show, _, skipped in float8.items_by_recipe(setting)}
    assert set(found) == set(FP8_RECIPES)
    assert "no products of mxfp8 on CPUs" in found["mxfp8"][1]
    for prove, skipped in found.values():
        if not skipped:
            proof = Proof(setting)
            prove(proof)
            assert [claim.state for claim in proof.claims] == [State.HOLDS, State.MEASURED]


def test_stage_3_is_held_against_fully_shard(setting: Setting) -> None:
    proof = show(only(command.PARTS["first"](setting), "stage 3 over one rank against fully_shard"), setting)
    assert [claim.state for claim in proof.claims] == [State.HOLDS, State.MEASURED]


def test_goes_through_graphs_against_eager_blocks_on_a_cpu(setting: Setting) -> None:
    for item in graphs.items(setting):
        proof = show(item, setting)
        assert failed(proof) == []
        assert "losses of 5 steps" in proof.claims[0].text


def test_graphs_that_compute_something_else_fail_their_proof(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    take = GradientReducer.take

    def as_without_graphs(self: GradientReducer, slot: Any) -> None:
        self.overwritten = False
        take(self, slot)

    monkeypatch.setattr(GradientReducer, "take", as_without_graphs)
    item = only(graphs.items(setting), "graphs: bound by launches, fp32 at stage 1")
    assert failed(show(item, setting))[0].startswith("losses of")


def test_the_model_by_hand_computes_what_ours_does() -> None:
    ours = build_transformer(SMALL, 64, seed=0, dtype=torch.float64, loss_chunk_size=50)
    hand = Llama(SMALL, 64, chunk=50, compiled=False).double()
    weights = dict(ours.named_parameters())
    hand.take(weights)
    batch = {name: torch.randint(0, SMALL.vocab_size, (3, 64)) for name in ("tokens", "labels")}
    losses = [model(**batch) for model in (ours, hand)]
    for loss in losses:
        (2 * loss).backward()
    assert abs(float(losses[0].detach() - losses[1].detach())) <= 1e-12
    gradients = Llama(SMALL, 64, chunk=50, compiled=False).double()
    gradients.take({name: parameter.grad for name, parameter in weights.items()})
    for (name, parameter), wanted in zip(hand.named_parameters(), gradients.parameters(), strict=True):
        assert (parameter.grad - wanted).abs().max() <= 1e-12, name


def test_goes_through_the_comparison_with_the_model_by_hand_on_a_cpu(setting: Setting) -> None:
    config = TrialConfig(precision="fp32", micro_batch_size=2, zero_stage=1)
    values = {"config": config.values(), "rate": {"mean": 2.0}}
    setting.known = {("grid", "measured: any"): Line(part="grid", item="measured: any", state=State.MEASURED, values=values)}
    proof = show(only(by_hand.items(setting), by_hand.TUNED), setting)
    assert failed(proof) == []
    assert "ours: the grid's best (micro 2, " in proof.claims[0].text
    assert "as a multiple of the model's by hand" in proof.claims[-1].text


def test_two_ranks_over_host_messages_on_a_cpu(setting: Setting, forked_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "OFFLOADS", {3: pair.OFFLOADS[3][-1:]})
    items = pair.items(setting)
    show(only(items, pair.SINGLE_RANK), setting)
    layout, offload = (only(items, f"two ranks: {name}") for name in ("pipeline 2, 1f1b", "offloading at stage 3"))
    proofs = [show(item, setting) for item in (layout, offload)]
    assert [failed(proof) for proof in proofs] == [[], []]
    assert [len(proof.claims) for proof in proofs] == [2, 3]


def test_ratio_of_interleaved_rounds() -> None:
    same = ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (same.mean, same.low, same.high) == pytest.approx((2.0, 2.0, 2.0))
    spread = ratio([1.0, 2.0], [1.0, 1.0])
    assert spread.mean == pytest.approx(2**0.5)
    assert spread.low < 1.0 < 2.0 < spread.high
