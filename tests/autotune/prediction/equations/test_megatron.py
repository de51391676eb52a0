"""The memory of Megatron-LM: sums of terms that its source shows, written out by hand for a small model."""

import dataclasses
import os
from pathlib import Path

import pytest

from autotune.frameworks.framework import Surroundings
from autotune.frameworks.read import read_written
from autotune.knowledge.row_cases import cases_of_rows, refusal
from autotune.knowledge.table import CsvRecord, read_records
from autotune.prediction.equations.coefficients import Coefficients
from autotune.prediction.equations.memory import memory
from autotune.prediction.planning.estimate import StepEstimate, estimates
from autotune.prediction.planning.question import question_of
from autotune.recipes.lint import lint
from benchmarks.prediction.megatron_golden import classes, judged
from benchmarks.prediction.simumax import MODELS
from search_spaces.clusters.presets import resolve_cluster
from search_spaces.models.huggingface import resolve_model
from search_spaces.trial_config import TrialConfig

DATA = Path(os.environ.get("AUTOTUNE_DATA", Path(__file__).parents[5] / "shared" / "data"))
MIB = 2**20
B, S, H, A, V, L = 4, 1024, 512, 8, 50304, 12
"""Samples, tokens, width, heads, vocabulary, layers."""
UNIT = 2 * B * S * H
"""Bytes of a hidden state."""
DENSE = {
    "source": "tests", "model_name": "GPT", "num_layers": L, "hidden": H, "heads": A, "kv_heads": A, "ffn_hidden": 4 * H,
    "vocab": V, "seq_len": S, "gpu_type": "H100-SXM-80GB", "num_gpus": 8, "precision": "bf16", "zero_stage": 1,
    "tp": 1, "pp": 1,
    "micro_batch": B, "global_batch": 32, "recompute": "none", "sequence_parallel": "false", "framework": "Megatron-LM",
    "mem_kind": "torch peak allocated, GiB, rank world_size-1 (last pipeline stage)", "outcome": "ok",
    "transformer_impl": "transformer_engine", "attention_backend": "unfused", "kv_channels": H // A, "position": "learned",
    "max_positions": S, "tied_embeddings": "True", "deterministic": "True", "cublas_workspace": ":4096:8",
    "gradient_accumulation_fusion": "False",
}  # fmt: skip
EXPERTS = {
    "experts": 8, "topk": 2, "moe_ffn": 2 * H, "ep": 4, "bias_linear": "False", "dispatcher": "alltoall",
    "grouped_gemm": "True",
    "bias_gelu_fusion": "False",
}  # fmt: skip
LATENT = {
    "mla": "True", "q_lora_rank": 256, "kv_lora_rank": 128, "qk_head_dim": 64, "qk_pos_dim": 32, "v_head_dim": 64,
    "swiglu": "True", "bias_linear": "False", "normalization": "RMSNorm", "attention_backend": "fused",
}  # fmt: skip


def tags(**cells: object) -> dict[str, float]:
    """Bytes by tag of the row with these cells."""
    stated = {name: str(cell) for name, cell in {**DENSE, **cells}.items() if cell != ""}
    record = CsvRecord(line=2, cells=stated)
    rows, problems = read_records([record])
    assert not problems
    found = memory(cases_of_rows(rows), Coefficients())
    return {name: float(values[0]) for name, values in found.by_tag.items()}


LAYER = 12 * H**2 + 13 * H
PARAMETERS = L * LAYER + (V + S) * H + 2 * H
SCORES = 5 * A * S**2 * B
"""Results of softmax and dropout, and its mask [Korthikanti 2022, 4.1]."""
ENDS = 3.5 * UNIT
"""A mask of dropout, input and result of the last norm, and the attention mask of the loader, b s² bytes."""


def test_a_dense_model_on_one_rank_is_the_sum_of_published_terms() -> None:
    found = tags()
    assert found["parameters"] == 2 * PARAMETERS
    assert found["gradients"] == 4 * PARAMETERS
    assert found["optimizer_state"] == 12 * PARAMETERS / 8
    assert found["buffers"] == 3 * 32 * MIB
    assert found["activations"] == pytest.approx(L * (17 * UNIT + SCORES) + 6 * B * S * V + ENDS, rel=1e-9)


@pytest.mark.parametrize(
    ("cells", "difference"),
    [
        ({"attention_backend": "fused"}, L * (4 * A * B * S - SCORES)),
        ({"attention_backend": "flash"}, L * (4 * A * B * S + UNIT - SCORES)),
        ({"attention_backend": "auto"}, L * (4 * A * B * S - SCORES)),
        ({"attention_backend": "auto", "gpu_type": "A100-SXM-80GB"}, L * (4 * A * B * S + UNIT - SCORES)),
        ({"attention_dropout": 0.0}, -L * 3 * A * S**2 * B),
        ({"hidden_dropout": 0.0}, -(L + 0.5) * UNIT),
        ({"recompute": "selective"}, -L * SCORES),
        ({"transformer_impl": "local", "persist_layer_norm": "False"}, L * 2 * A * S**2 * B),
        ({"swiglu": "True", "attention_backend": "fused"}, L * (4 * A * B * S - SCORES + 4 * UNIT)),
        ({"cross_entropy_fusion": "native"}, 4 * B * S * V),
        ({"cross_entropy_fusion": "te"}, -4 * B * S * V),
        ({"qk_layernorm": "True"}, L * 2 * UNIT),
        ({"recompute": "full", "recompute_method": "uniform"}, -L * (16 * UNIT + SCORES)),
        ({"recompute": "full", "recompute_method": "block", "recompute_num_layers": 8}, -8 * (16 * UNIT + SCORES)),
    ],
)
def test_an_argument_changes_activations_by_what_it_keeps(cells: dict[str, object], difference: float) -> None:
    assert tags(**cells)["activations"] - tags()["activations"] == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize(
    ("cells", "tag", "share"),
    [
        ({"zero_stage": 0}, "optimizer_state", 8),
        ({"dist_optimizer_instances": 2}, "optimizer_state", 2),
        ({"precision": "fp16"}, "gradients", 1 / 2),
        ({"precision": "fp32"}, "optimizer_state", 8 / 12),
        ({"zero_stage": 3}, "parameters", 1 / 8),
        ({"fp8_recipe": "tensorwise"}, "parameters", 2 - ((V + S) * H + 2 * H) / PARAMETERS),
        ({"cublas_workspace": "", "gpu_type": "A100-SXM-80GB"}, "buffers", (2 * 8.125 + 4) / 96),
        ({"transformer_impl": "local"}, "buffers", (64 + 64) / 96),
        ({"gradient_accumulation_fusion": "True"}, "buffers", 1 + 2 * (12 * H**2 + V * H) / MIB / 96),
    ],
)
def test_an_argument_changes_states_and_buffers(cells: dict[str, object], tag: str, share: float) -> None:
    assert tags(**cells)[tag] == pytest.approx(share * tags()[tag], rel=1e-6)


def test_tensor_ranks_divide_what_they_compute_and_sequence_parallelism_the_rest() -> None:
    whole = tags(tp=4, attention_backend="fused")
    divided = tags(tp=4, attention_backend="fused", sequence_parallel="true")
    assert whole["activations"] - divided["activations"] == pytest.approx(3 / 4 * (L * 5 + 2.5) * UNIT, rel=1e-6)
    assert divided["buffers"] - whole["buffers"] == UNIT  # the gathered input of the output projection


def test_the_last_rank_of_a_pipeline_keeps_its_own_layers() -> None:
    """Looped ranks run all but the last of their stages for as many micro-batches as there are ranks before the first loss."""
    one_stage = tags(pp=4, attention_backend="fused")["activations"]
    looped = tags(pp=4, vpp=3, attention_backend="fused")["activations"]
    assert looped - one_stage == pytest.approx((9 - 3) * (17 * UNIT + 4 * A * B * S) + UNIT, rel=1e-6)
    uneven = tags(pp=4, last_stage_layers=6, first_stage_layers=2, attention_backend="fused")["activations"]
    assert uneven - one_stage == pytest.approx(3 * (17 * UNIT + 4 * A * B * S), rel=1e-6)
    assert tags(pp=4, pipeline_layout="Ett|ttt|ttt|ttttL")["gradients"] == pytest.approx(4 * (4 * LAYER + V * H + 2 * H))


def test_the_embedding_and_the_loss_can_take_the_place_of_a_layer() -> None:
    accounts = {"account_embedding": "True", "account_loss": "True", "num_layers": 6, "pp": 4, "vpp": 2}
    assert tags(**accounts)["gradients"] == pytest.approx(4 * (LAYER + V * H + 2 * H))


def test_rows_of_experts_are_kept_where_they_are_computed() -> None:
    found, attention = tags(**EXPERTS), 4 * H**2 + 4 * H
    rows = 2 * B * S
    kept = rows * (2 * H + 2 * H + 3 * 2 * 2 * H)  # input, results that are added, and hidden, activated and weighted
    dense = 8.5 * UNIT + SCORES + 2.5 * UNIT - UNIT / 2  # attention, and the norm before the experts
    assert found["activations"] == pytest.approx(L * (dense - 0.5 * UNIT + kept) + 6 * B * S * V + ENDS, rel=0.02)
    common = L * (attention + 8 * H) + (V + S) * H + 2 * H
    assert found["gradients"] == pytest.approx(4 * (common + L * 2 * 2 * 2 * H * H), rel=1e-9)
    assert found["buffers"] == (3 + 4) * 32 * MIB


def test_latent_attention_keeps_narrow_vectors_and_wide_heads() -> None:
    projected = 256 * A * 96 + 128 * A * (64 + 64)
    layer = H * (256 + 128 + 32) + projected + A * 64 * H + 384 + 2 * H + 3 * H * 4 * H
    assert tags(**LATENT)["gradients"] == pytest.approx(4 * (L * layer + (V + S) * H + H), rel=1e-9)
    recomputed = tags(**LATENT, recompute="selective", recompute_modules="mla_up_proj layernorm")
    dropped = 2 * B * S * (2 * A * 96 + A * 64 + 384 + H)
    assert tags(**LATENT)["activations"] - recomputed["activations"] == pytest.approx(L * dropped, rel=1e-6)


def test_deferred_gradients_of_the_output_projection_wait_with_their_inputs() -> None:
    deferred = tags(pp=4, defer_embedding_wgrad="True")["activations"] - tags(pp=4)["activations"]
    assert deferred == pytest.approx(2 * 2 * B * S * (V + H))


LLAMA_70B, LLAMA_405B, DEEPSEEK_V2, DEEPSEEK_V3 = MODELS.values()
PUBLISHED = [
    (LLAMA_70B | {"pp": 2}, 66.55), (LLAMA_70B | {"tp": 2}, 60.68), (LLAMA_70B | {"tp": 4}, 39.07),
    (LLAMA_70B | {"tp": 8}, 28.29),
    (LLAMA_405B | {"pp": 2}, 87.08), (LLAMA_405B | {"tp": 2}, 81.59), (LLAMA_405B | {"tp": 4}, 52.89),
    (LLAMA_405B | {"tp": 8}, 38.57),
    (LLAMA_70B | {"tp": 2, "cp": 4, "seq_len": 32768}, 68.43), (LLAMA_70B | {"cp": 8, "seq_len": 32768}, 104.51),
    (LLAMA_405B | {"tp": 2, "cp": 4, "seq_len": 32768}, 87.03), (LLAMA_405B | {"cp": 8, "seq_len": 32768}, 139.22),
    (LLAMA_70B | {"tp": 2, "cp": 4, "seq_len": 131072}, 112.67), (LLAMA_70B | {"cp": 8, "seq_len": 131072}, 147.99),
    (LLAMA_405B | {"tp": 2, "cp": 4, "seq_len": 131072}, 118.13), (DEEPSEEK_V2 | {"ep": 8}, 45.63),
    (DEEPSEEK_V2 | {"ep": 4, "pp": 2}, 44.70), (DEEPSEEK_V3 | {"ep": 8}, 104.30), (DEEPSEEK_V3 | {"ep": 4, "pp": 2}, 114.00),
]  # fmt: skip
"""Cells -> GiB allocated on the fullest rank of eight B200 [MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md]. Its
context parallelism exchanges heads, and its runs with more micro-batches have the same memory."""


@pytest.mark.parametrize(("cells", "gib"), PUBLISHED, ids=str)
def test_published_runs_of_large_models_are_predicted(cells: dict[str, object], gib: float) -> None:
    ranks = int(str(cells.get("tp", 1))) * int(str(cells.get("pp", 1))) * int(str(cells.get("cp", 1)))
    exchanged = {"cp_comm_type": "a2a"} if "cp" in cells else {}
    found = tags(**{**cells, **exchanged, "global_batch": 4 * (8 // ranks)})
    allocated = sum(found[tag] for tag in ("parameters", "gradients", "optimizer_state", "activations", "buffers"))
    assert allocated / 2**30 == pytest.approx(gib, rel=0.011)


SCRIPT = """#!/bin/bash
export CUBLAS_WORKSPACE_CONFIG=:4096:8 CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 4 \\
  --global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257 --bf16 --lr 1e-4 \\
  --make-vocab-size-divisible-by 128 --use-distributed-optimizer --deterministic-mode --no-gradient-accumulation-fusion {more}
"""
MORE = {
    "--attention-backend unfused": {},
    "--attention-backend flash --hidden-dropout 0 --disable-bias-linear": {
        "attention_backend": "flash", "hidden_dropout": 0.0, "bias_linear": "False",
    },
    "--pipeline-model-parallel-size 4 --attention-backend fused --cross-entropy-loss-fusion": {
        "pp": 4, "attention_backend": "fused", "cross_entropy_fusion": "native",
    },
    "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 8 "
    "--expert-tensor-parallel-size 1 --moe-grouped-gemm --disable-bias-linear --attention-backend fused": {
        "tp": 2, "sequence_parallel": "true", "ep": 8, "etp": 1, "experts": 8, "topk": 2, "moe_ffn": 4 * H,
        "bias_linear": "False", "grouped_gemm": "True", "attention_backend": "fused", "vocab": 50432,
    },
}  # fmt: skip
"""Arguments of a script -> the cells of a row that state the same."""


@pytest.mark.parametrize("more", MORE, ids=lambda more: more.split()[0] + str(len(more)))
def test_a_script_is_predicted_as_the_row_with_its_arguments(more: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.format(more=more), encoding="utf-8")
    outlook = lint(read_written(path, "megatron")[0], Surroundings(cluster=resolve_cluster("dgx-h100:1"))).outlook
    assert isinstance(outlook, StepEstimate), outlook
    row = tags(**MORE[more])
    for tag in ("parameters", "gradients", "optimizer_state", "activations", "buffers"):
        assert outlook.ranks[-1].by_tag[tag] == pytest.approx(row[tag], rel=1e-6), tag


def test_a_plan_for_its_export_keeps_what_megatron_keeps() -> None:
    model, cluster = resolve_model("llama-3-8b"), resolve_cluster("dgx-h100:1")
    native = question_of(model, cluster, global_batch_size=64, sequence_length=4096)
    exported = dataclasses.replace(native, simple="megatron")
    config = TrialConfig(tensor_parallel_size=2, sequence_parallel=True, zero_stage=1, precision="bf16")
    bytes_of = {simple: estimates(question, [config])[0].ranks[0].by_tag for simple, question in
                ((None, native), ("megatron", exported))}  # fmt: skip
    tokens, h, ffn = 4096, 4096, 14336
    layer = 2 * tokens * (4 * h + h + 2 * 1024 + h + 3 * ffn) / 2 + 4 * 32 * tokens / 2
    ends, logits = 2 * 2 * tokens * h / 2 + tokens * 4096, 6 * tokens * 128_256 / 2
    assert bytes_of["megatron"]["activations"] == pytest.approx(32 * layer + ends + logits, rel=1e-3)
    assert bytes_of["megatron"]["activations"] < bytes_of[None]["activations"]


def test_an_embedding_with_a_stage_of_its_own_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    more = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --account-for-embedding-in-pipeline-split"
    text = SCRIPT.format(more=f"{more} --account-for-loss-in-pipeline-split").replace("--num-layers 12", "--num-layers 6")
    path.write_text(text, encoding="utf-8")
    assert not lint(read_written(path, "megatron")[0], Surroundings(cluster=resolve_cluster("dgx-h100:1"))).findings


@pytest.mark.parametrize("cells", [{"etp": "two"}, {"pipeline_layout": "Ett|tL", "pp": 2, "experts": 8, "topk": 2, "ep": 8,
                                    "moe_layer_freq": "[1]*2"}, {"kv_channels": "wide"}], ids=str)  # fmt: skip
def test_arguments_that_cannot_be_read_skip_the_row(cells: dict[str, object]) -> None:
    record = CsvRecord(line=2, cells={name: str(cell) for name, cell in {**DENSE, **cells}.items()})
    (got,), _ = read_records([record])
    assert "do not belong together" in (refusal(got) or "")


@pytest.mark.skipif(not (DATA / "megatron_golden_visible.csv").exists(), reason="needs ../shared/data, or AUTOTUNE_DATA")
def test_functional_tests_are_predicted_from_their_arguments() -> None:
    runs = judged(DATA / "megatron_golden_visible.csv")
    errors = sorted(abs(run.error) for run in runs)
    assert errors[len(errors) // 2] <= 0.01
    assert sorted(run.tail_error for run in runs)[int(0.95 * len(runs))] <= 0.05
    assert all(run.fits for run in runs)
    for feature, having in classes(runs).items():
        assert sorted(abs(run.error) for run in having)[len(having) // 2] <= 0.03, feature
