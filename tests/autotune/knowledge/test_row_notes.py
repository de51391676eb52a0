"""What notes state about a configuration is read; what they deny is not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.knowledge.row import TableRow
from autotune.knowledge.row_cases import (
    described,
    noted_adapters,
    noted_precision,
    noted_recompute,
    noted_software,
    numbers_of,
    row_software,
)
from autotune.knowledge.table import read_table
from benchmarks.prediction.scoring.table_predictor import TablePredictor

LONG = TableRow(
    line=1, row_id="1", num_layers=32, hidden=4096, heads=32, ffn_hidden=16384, vocab=51200, seq_len=16384, gpu_type="A100",
    num_gpus=64, gpus_per_node=8, tp=8, pp=1, dp=8, micro_batch=1, global_batch=64, framework="Megatron-LM", precision="bf16",
)  # fmt: skip


@pytest.mark.parametrize(
    ("notes", "kind"),
    [
        ("full activation checkpointing", "full"), ("uses selective recompute", "selective"), ("no recomputation", "none"),
        ("activation_checkpointing=full; x", "full"), ("", None), ("full recompute; later no recompute", None),
        ("recompute mode is not stated", None),
    ],
)  # fmt: skip
def test_recomputation(notes: str, kind: str | None) -> None:
    assert noted_recompute(notes) == kind


def test_adapters_with_their_rank() -> None:
    assert noted_adapters("finetuning with LoRA, rank 64") == 64
    assert noted_adapters("QLoRA r=8 alpha=16") == 8
    assert noted_adapters("method=LoRA") == 0
    assert noted_adapters("no LoRA") is None
    assert noted_adapters("full finetuning") is None


def test_kernels_moments_and_types() -> None:
    assert noted_software("FlashAttention-2 enabled", None) == ["flash attention"]
    assert noted_software("no flash attention", None) == []
    assert noted_software("", "AdamW8bit (bitsandbytes)") == ["adam 8bit"]
    assert noted_software("", "AdamW") == []
    assert noted_precision("precision_raw=FP8 tensorwise") == "fp8"
    assert noted_precision("bf16 run") is None


def test_flash_attention_in_notes_saves_the_scores_of_a_long_sequence() -> None:
    plain, flash = TablePredictor().forecast([LONG, replace(LONG, notes="with flash attention 2")]).memory_bytes
    assert flash < 0.6 * plain


def test_moments_in_eight_bits_take_six_bytes_less() -> None:
    whole = replace(LONG, zero_stage=0, notes="flash attention")
    plain, small = TablePredictor().forecast([whole, replace(whole, optimizer="8-bit Adam")]).memory_bytes
    assert plain - small == pytest.approx(6 * 6.9e9 / 8, rel=0.1)


def test_on_a_recent_device_the_name_of_megatron_does_not_mean_attention_of_2021() -> None:
    """Its other properties remain: fewer passes over activations, fp32 gradients."""
    recent = replace(LONG, gpu_type="H100-SXM-80GB", framework="Megatron-LM")
    named, core = TablePredictor().forecast([recent, replace(recent, framework="Megatron Core")]).step_seconds
    assert named == pytest.approx(core, rel=0.05)


RECENT = replace(LONG, gpu_type="B200-SXM-180GB", framework="Megatron-LM")


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 1.0), ({"precision": "fp8"}, 0.5), ({"precision": "MXFP8 (fp32 accumulation)"}, 0.5),
        ({"precision": "nvfp4"}, 0.5), ({"precision": "bf16+fp8_e4m3"}, 0.5), ({"gpu_type": "A100-SXM-80GB"}, 1.0),
        ({"notes": "kernel=fp8 attention"}, 1.0),
        ({"precision": "fp8", "framework": "torchtitan", "notes": "kernel=megatron"}, 1.0),
    ],
)  # fmt: skip
def test_words_of_software_match_the_fields_they_are_meant_for(changes: dict[str, str], share: float) -> None:
    """Transformer Engine keeps inputs in 8 bits where the row's precision says so, not where its device or kernel could."""
    assert numbers_of(row_software(described(replace(RECENT, **changes))))["input_share"] == share


def test_words_of_software_are_whole_words() -> None:
    assert numbers_of(row_software("framework=megatronlm"))["gradient_bytes"] == 4.0
    assert numbers_of(row_software("framework=premegatron"))["gradient_bytes"] == 2.0
    assert (
        numbers_of(row_software("framework=torchtitan; recompile"))["logit_bytes"]
        == numbers_of(row_software("framework=torchtitan"))["logit_bytes"]
    )
    assert numbers_of(row_software("framework=torchtitan; torch.compile"))["logit_bytes"] == 14.0
    assert numbers_of(row_software("kernel=flash_attentionv1.0.8"))["attention_speed"] == 0.6
    assert numbers_of(row_software("kernel=flash_attentionv10"))["attention_speed"] == 1.0
    assert described(replace(LONG, framework="torchtitan + compile")).count("compile") == 2


@pytest.mark.parametrize("framework", ["Megatron-LM", "Megatron-DeepSpeed", "nanotron", "torchtitan", "aa-scaling", "LitGPT"])
def test_features_that_are_stated_replace_the_name(framework: str) -> None:
    """Names only give what is not stated: without the name, or with another one, the answers are the same."""
    row = replace(LONG, framework=framework)
    stated = "; ".join(f"{name}={value:g}" for name, value in numbers_of(row_software(described(row))).items())
    asked = [row, *(replace(row, framework=name, notes=stated) for name in (None, "x", "Megatron-LM", "nanotron"))]
    forecast = TablePredictor().forecast(asked)
    assert np.ptp(forecast.step_seconds) == pytest.approx(0, abs=1e-9)
    assert np.ptp(forecast.memory_bytes) == pytest.approx(0, abs=1.0)


def test_a_negative_throughput_is_a_problem_and_not_a_measurement(tmp_path: Path) -> None:
    columns = (
        "num_layers,hidden,heads,vocab,seq_len,gpu_type,num_gpus,tp,pp,dp,zero_stage,micro_batch,tokens_per_s_per_gpu,notes"
    )
    path = tmp_path / "table.csv"
    path.write_text(f"{columns}\n32,4096,32,32000,2048,A100,8,1,1,8,1,1,-100,full recompute; FP8\n", encoding="utf-8")
    table = read_table(path)
    (row,) = table.rows
    assert row.tokens_per_s_per_gpu is None
    assert any("tokens_per_s_per_gpu '-100' is not positive" in problem.problem for problem in table.problems)
    assert (row.recompute, row.precision) == ("full", "fp8")
