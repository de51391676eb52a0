"""`make gpu` skips where there is no GPU, needs torch and the standard library alone, and its proofs go through on a CPU."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_kernels, gpu_pair
from benchmarks.gpu_baseline import Llama
from benchmarks.gpu_by_hand import SMALL, prove_against_hand
from benchmarks.gpu_float8 import prove_float8
from benchmarks.gpu_graphs import prove_graphs
from benchmarks.gpu_kernels import prove_kernels
from benchmarks.gpu_packing import prove_packing
from benchmarks.gpu_pair import Pair, prove_layouts, prove_offload
from benchmarks.gpu_proof import Proof, ratio
from benchmarks.gpu_windows import prove_windows
from executor.engines.native.buckets import GradientReducer
from executor.engines.native.model import build_transformer
from executor.runners.local import LocalRunner
from search_spaces.huggingface import resolve_model
from search_spaces.model import ModelSpec
from search_spaces.trial import Workload

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
STAND_INS = Path(__file__).parent / "executor" / "engines" / "native" / "stand_ins"

ALONE = """
import importlib.abc, runpy, sys
class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "optuna", "sqlalchemy", "alembic", "fastapi", "typer", "rich", "platformdirs"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Forbid())
sys.argv = [SCRIPT, "--help"]
try:
    runpy.run_path(SCRIPT, run_name="__main__")
except SystemExit as ended:
    assert not ended.code
import benchmarks.gpu_rank, executor.runners.local, executor.runners.rank_loop, executor.trial
"""


pytestmark = pytest.mark.usefixtures("one_thread")


def test_imports_no_more_than_torch_and_the_standard_library() -> None:
    script = ALONE.replace("SCRIPT", repr(str(SCRIPT)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run `make gpu`")
def test_skips_with_a_reason_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    assert gpu.main() == 0
    assert capsys.readouterr().out.startswith("skipped: torch")


def test_packed_documents_equal_a_mask() -> None:
    proof = Proof()
    prove_packing(proof, torch.device("cpu"))
    assert proof.failed == []
    assert len(proof.lines) > 4


def test_kernels_that_are_not_there_are_skipped_with_the_reason() -> None:
    proof = Proof()
    prove_kernels(proof, resolve_model("llama-tiny"), Workload(global_batch_size=4, sequence_length=64), torch.device("cpu"))
    assert proof.failed == []
    assert [line for line in proof.lines if line.startswith("- skipped: liger: fused-kernels-device: ")]


def test_losses_by_kernels_are_held_against_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """By packages that stand in for the real ones."""
    for module in ("benchmarks.gpu_kernels", "executor.engines.native.fused.load"):
        monkeypatch.setattr(f"{module}.kernel_refusals", lambda *_: [])
    monkeypatch.setattr(gpu_kernels, "_measure", lambda *_: None)
    monkeypatch.syspath_prepend(str(STAND_INS))
    proof = Proof()
    prove_kernels(proof, resolve_model("llama-tiny"), Workload(global_batch_size=4, sequence_length=64), torch.device("cpu"))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("liger_kernel", "transformer_engine")]:
        del sys.modules[name]
    assert proof.failed == []
    assert len([line for line in proof.lines if "losses of 3 steps" in line]) == 4


def test_products_in_8_bits_lose_as_much_as_bf16() -> None:
    proof = Proof()
    prove_float8(proof, "cpu")
    assert proof.failed == []
    assert proof.lines[-1].startswith("- holds: ")


def test_windows_equal_a_mask() -> None:
    proof = Proof()
    prove_windows(proof, torch.device("cpu"))
    assert proof.failed == []
    assert len(proof.lines) > 4


def test_goes_through_graphs_against_eager_blocks_on_a_cpu() -> None:
    proof = Proof(times=False)
    prove_graphs(proof, torch.device("cpu"))
    assert proof.failed == []
    assert sum("of those with graphs" in line for line in proof.lines) == 2
    assert sum("off those of eager blocks" in line for line in proof.lines) == 2


def test_graphs_that_compute_something_else_fail_their_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    take = GradientReducer.take

    def as_without_graphs(self: GradientReducer, slot: Any) -> None:
        self.overwritten = False
        take(self, slot)

    monkeypatch.setattr(GradientReducer, "take", as_without_graphs)
    proof = Proof(times=False)
    prove_graphs(proof, torch.device("cpu"))
    assert [line for line in proof.failed if "fp32, stage 1: losses" in line]


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


def test_goes_through_the_comparison_with_the_model_by_hand_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    proof = Proof(times=False)
    prove_against_hand(proof, torch.device("cpu"))
    assert not proof.failed
    assert "| by hand |" in capsys.readouterr().out
    assert sum("samples/s at least 1.0 of the model by hand" in line for line in proof.lines) == 1


def test_two_ranks_over_host_messages_on_a_cpu(forked_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pair, "LAYOUTS", {"zbv": gpu_pair.LAYOUTS["pipeline 2, zbv"]})
    monkeypatch.setattr(gpu_pair, "OFFLOADS", {3: gpu_pair.OFFLOADS[3][-1:]})
    monkeypatch.setattr(gpu_pair, "LOSS_BOUND", {"bf16": 2e-3})
    model = ModelSpec(
        name="llama-nano", family="llama", num_layers=4, hidden_size=32, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, ffn_hidden_size=64, vocab_size=256, sequence_length=64,
    )  # fmt: skip
    proof = Proof(times=False)
    environment = {"PYTHONPATH": str(SCRIPT.parents[1])}
    with LocalRunner(2, device="cpu", environment=environment, trial_function="benchmarks.gpu_rank:run_trial") as runner:
        pair = Pair("cpu", runner, model, Workload(global_batch_size=8, sequence_length=64), rounds=1, round_seconds=0.1)
        prove_layouts(proof, pair)
        prove_offload(proof, pair)
    assert not proof.failed
    assert len(proof.lines) == 4


def test_a_proof_that_raises_fails_alone() -> None:
    proof, shown = Proof(), []

    def broken() -> None:
        raise RuntimeError("no such kernel")

    proof.attempt("broken", broken)
    proof.attempt("sound", lambda: shown.append(True))
    assert proof.failed == ["the proof 'broken' came to its end: RuntimeError: no such kernel"]
    assert shown == [True]


def test_ratio_of_interleaved_rounds() -> None:
    same = ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (same.mean, same.low, same.high) == pytest.approx((2.0, 2.0, 2.0))
    spread = ratio([1.0, 2.0], [1.0, 1.0])
    assert spread.mean == pytest.approx(2**0.5)
    assert spread.low < 1.0 < 2.0 < spread.high
