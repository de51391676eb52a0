"""Rows that name a model which a table's columns cannot describe."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.knowledge.row import TableRow
from autotune.knowledge.row_cases import case_of, refusal
from autotune.knowledge.row_names import completed, named_model
from autotune.knowledge.table import read_table
from search_spaces.models.huggingface import resolve_model
from tests.autotune.measurements import row as table_row
from tests.autotune.measurements import write_table

ROW = TableRow(
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


@pytest.mark.parametrize(
    ("name", "stated", "sizes"),
    [
        ("DeepSeekV3", {"num_layers": 61, "hidden": 7168, "heads": 128, "kv_heads": 1, "vocab": 129280}, {}),
        ("DeepSeekV3", {"num_layers": 30, "kv_heads": 128}, {"num_layers": 30}),
        ("DeepSeekV3", {"experts": 64, "topk": 4, "dense_first_layers": 1},
         {"num_experts": 64, "experts_per_token": 4, "dense_layers": (True,) + 60 * (False,)}),
        ("Qwen3_30B_a3B", {"kv_heads": 32, "ffn_hidden": 6144}, {"num_key_value_heads": 32}),
        ("Mixtral-8x7B", {"vocab": 256_000}, {"vocab_size": 256_000}),
        ("Mixtral-8x7B", {"hidden": 2048, "heads": 16, "num_layers": 12, "ffn_hidden": 7168},
         {"hidden_size": 2048, "num_attention_heads": 16, "num_layers": 12, "ffn_hidden_size": 7168, "head_dim": 128}),
        ("gemma3_27b", {"heads": 16}, {"num_attention_heads": 16}),
    ],
)  # fmt: skip
def test_a_named_model_has_the_sizes_that_its_row_states(name: str, stated: dict[str, int], sizes: dict[str, object]) -> None:
    preset, model = named_model(replace(ROW, model_name=name)), named_model(replace(ROW, model_name=name, **stated))
    assert preset is not None
    assert model == replace(preset, **sizes)


def test_sizes_that_a_named_model_cannot_have_are_refused() -> None:
    wrong = replace(ROW, model_name="Mixtral-8x7B", heads=12)
    assert refusal(wrong) == (
        "states sizes that Mixtral-8x7B cannot have: num_key_value_heads 8 does not divide 12 attention heads"
    )


def test_columns_that_suffice_are_read() -> None:
    llama = replace(ROW, model_name="LLAMA3_8B", num_layers=32, hidden=4096, heads=32, kv_heads=8)
    assert named_model(llama) is None
    assert completed(llama) is llama
    unstated = completed(replace(ROW, model_name="LLAMA3_8B"))
    assert (unstated.num_layers, unstated.hidden, unstated.heads, unstated.kv_heads) == (32, 4096, 32, 8)


@pytest.mark.parametrize(
    ("framework", "ep", "slices"), [("Megatron-LM", 32, 2), ("Megatron-Bridge", 32, 1), ("Megatron-Bridge", 1, 2)]
)
def test_recipes_of_megatron_bridge_have_whole_experts(framework: str, ep: int, slices: int) -> None:
    row = replace(ROW, framework=framework, num_gpus=256, tp=2, pp=1, cp=1, ep=ep)
    assert case_of(row).layouts.expert_tensor[0] == slices


def test_the_case_of_a_named_model_has_its_experts_and_latent_attention() -> None:
    assert refusal(ROW) is None
    shapes, model = case_of(ROW).shapes, resolve_model("deepseek-v3")
    assert shapes.experts[0] == model.num_experts == 256
    assert shapes.key_value_rank[0] == 512
    assert shapes.expert_share[0] == pytest.approx(58 / 61)
    assert case_of(ROW).layouts.expert[0] == 32
    assert refusal(replace(ROW, model_name="unheard of")) == "has no num_layers"


SPARSE = replace(
    ROW, model_name="our own", num_layers=12, hidden=512, heads=8, kv_heads=8, ffn_hidden=2048, vocab=50_304, pp=1, dp=256,
    experts=8, topk=2, moe_ffn=1024, shared_expert=512,
)  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "share"),
    [
        ({}, 1.0), ({"dense_first_layers": 3}, 0.75), ({"moe_layer_freq": "([0]*4+[1]*8)", "dense_first_layers": 4}, 2 / 3),
        ({"moe_layer_freq": "2"}, 0.5), ({"moe_layer_freq": "([0]+[1,1])*4"}, 2 / 3),
    ],
)  # fmt: skip
def test_experts_in_columns_are_read(layers: dict[str, object], share: float) -> None:
    shapes = case_of(replace(SPARSE, **layers)).shapes
    assert (shapes.experts[0], shapes.experts_per_token[0], shapes.ffn[0], shapes.shared_ffn[0]) == (8, 2, 1024, 512)
    assert shapes.expert_share[0] == pytest.approx(share)
    assert shapes.dense_ffn[0] == (0 if share == 1 else 2048)


def test_a_stated_number_of_parameters_counts_the_experts() -> None:
    """12 layers of attention (1.05 M), 8 experts and the shared one of two matrices each, and an embedding used twice."""
    layer = 4 * 512**2 + 2 * 512 * (8 * 1024 + 512)
    tied = case_of(replace(SPARSE, params_b=(12 * layer + 50_304 * 512) / 1e9)).shapes
    assert (tied.matrices[0], tied.tied[0]) == (2, 1)


def test_experts_without_their_number_per_token_are_refused_and_none_are_none() -> None:
    assert refusal(replace(SPARSE, topk=None)) == "topk None is not between 1 and 8 experts"
    dense = case_of(replace(SPARSE, experts=0)).shapes
    assert (dense.experts[0], dense.ffn[0], dense.shared_ffn[0]) == (0, 2048, 0)


def test_columns_of_experts_are_read_from_a_table(tmp_path: Path) -> None:
    cells = {"experts": 8, "topk": 2, "moe_ffn": 1024, "shared_expert": 0, "dense_first_layers": 0, "moe_layer_freq": "1"}
    (row,) = read_table(write_table(tmp_path / "table.csv", [table_row("a", **cells)])).rows
    assert {name: getattr(row, name) for name in cells} == cells
    assert case_of(row).shapes.experts[0] == 8
