"""Rows that name a model which a table's columns cannot describe."""

from dataclasses import replace

import pytest

from autotune.evaluation.row_cases import case_of, refusal
from autotune.evaluation.row_models import completed, named_model
from autotune.evaluation.validation.row import Row
from search_spaces.models.huggingface import resolve_model

ROW = Row(
    line=2, row_id="1", model_name="DeepSeekV3", seq_len=4096, gpu_type="H100-SXM-80GB", num_gpus=256, tp=1, pp=8, dp=32,
    ep=32, micro_batch=1, global_batch=1024, framework="Megatron-Core",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("DeepSeekV3", "deepseek-v3"), ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"), ("DeepSeek-V3-Base", "deepseek-v3"),
        ("GPT OSS 120B", "gpt-oss-120b"), ("Qwen3_30B_a3B", "qwen3-30b-a3b"), ("Qwen3_235B_a22B", "qwen3-235b-a22b"),
        ("Kimi-K2", "kimi-k2"), ("gemma3_27b", "gemma-3-27b"), ("DeepSeek-V2-Lite", "deepseek-v2-lite"),
        ("qwen3-8b", "qwen3-8b"), ("GPT-175B", None), ("", None), ("DeepSeek-V31", None),
    ],
)  # fmt: skip
def test_names_of_presets_are_recognised(name: str, preset: str | None) -> None:
    found = named_model(replace(ROW, model_name=name))
    assert (found.name if found else None) == preset


def test_a_row_that_states_another_shape_is_what_it_states() -> None:
    assert named_model(replace(ROW, num_layers=61, hidden=7168, heads=128, kv_heads=1, vocab=129280)) is not None
    assert named_model(replace(ROW, vocab=130_000)) is not None  # padded
    assert named_model(replace(ROW, num_layers=30)) is None
    assert named_model(replace(ROW, model_name="Qwen3_30B_a3B", kv_heads=32)) is None


def test_columns_that_suffice_are_read() -> None:
    llama = replace(ROW, model_name="LLAMA3_8B", num_layers=32, hidden=4096, heads=32, kv_heads=8)
    assert named_model(llama) is None
    assert completed(llama) is llama
    unstated = completed(replace(ROW, model_name="LLAMA3_8B"))
    assert (unstated.num_layers, unstated.hidden, unstated.heads, unstated.kv_heads) == (32, 4096, 32, 8)


def test_the_case_of_a_named_model_has_its_experts_and_latent_attention() -> None:
    assert refusal(ROW) is None
    shapes, model = case_of(ROW).shapes, resolve_model("deepseek-v3")
    assert shapes.experts[0] == model.num_experts == 256
    assert shapes.key_value_rank[0] == 512
    assert shapes.expert_share[0] == pytest.approx(58 / 61)
    assert case_of(ROW).layouts.expert[0] == 32
    assert refusal(replace(ROW, model_name="unheard of")) == "has no num_layers"
