"""What newer families' config.json files say: windows and rotations by layer, scaled rotations, limits, and what is refused."""

import dataclasses
import math
from typing import Any

import pytest

from search_spaces.errors import ModelFormatError
from search_spaces.models.config_keys import RopeKind, RopeScaling
from search_spaces.models.huggingface import model_spec_from_config, resolve_model
from search_spaces.models.model import HeadNorm, ModelSpec, NormPlace

SIZES = {
    "num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip


def spec(family: str, **more: Any) -> ModelSpec:
    return model_spec_from_config({"model_type": family, **SIZES, **more}, "it")


def windowed(model: ModelSpec) -> str:
    return "".join("w" if model.has_window(layer) else "." for layer in range(model.num_layers))


def test_windows_by_layer() -> None:
    assert windowed(spec("gemma2", sliding_window=8)) == "w.w.w."
    assert windowed(spec("gemma3_text", sliding_window=8)) == "wwwww."
    assert windowed(spec("gemma3_text", sliding_window=8, sliding_window_pattern=3)) == "ww.ww."
    assert windowed(spec("olmo3", sliding_window=8)) == "www.ww"
    assert windowed(spec("qwen3", sliding_window=8)) == "......"
    assert windowed(spec("qwen3", sliding_window=8, use_sliding_window=True, max_window_layers=4)) == "....ww"
    stated = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    assert windowed(spec("gemma2", sliding_window=8, layer_types=stated)) == ".ww.ww"


def test_a_pattern_is_the_shortest_and_goes_on_in_a_model_of_another_depth() -> None:
    assert spec("gemma2", sliding_window=8).whole_layers == (False, True)
    assert spec("olmo3", sliding_window=8).whole_layers == (False, False, False, True)
    assert spec("olmo3", sliding_window=8).layer_period == 4
    assert spec("phi3", sliding_window=8).whole_layers == ()


def test_half_of_the_layers_with_a_window_save_half_of_the_scores() -> None:
    half = spec("gemma2", sliding_window=64)
    whole = dataclasses.replace(half, sliding_window=0, whole_layers=())
    assert (half.attended(256), whole.attended(256)) == ((64 + 256) / 2, 256)
    assert whole.flops_per_token(256) - half.flops_per_token(256) == 12 * 6 * 4 * 16 * (256 - 160)


def test_rotations_by_layer() -> None:
    model = spec("smollm3")
    assert [model.is_rotated(layer) for layer in range(6)] == [True, True, True, False, True, True]
    gemma = resolve_model("gemma-3-27b")
    assert (gemma.rope_theta, gemma.window_rope_theta) == (1e6, 1e4)
    assert gemma.rope_scaling == RopeScaling(kind=RopeKind.LINEAR, factor=8.0)


def test_scaled_rotations() -> None:
    scaling = resolve_model("llama-3.2-1b").rope_scaling
    assert scaling == RopeScaling(
        kind=RopeKind.LLAMA3, factor=32.0, original_length=8192, low_frequency_factor=1.0, high_frequency_factor=4.0
    )
    yarn = spec("qwen3", rope_scaling={"type": "yarn", "factor": 4.0}).rope_scaling
    assert yarn is not None
    assert (yarn.original_length, round(yarn.attention_factor, 4)) == (256, 1.1386)
    assert spec("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}).rope_scaling is None


def test_layers_with_experts_and_dense_layers() -> None:
    model = spec("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2)
    assert [model.has_experts(layer) for layer in range(6)] == [False, False, False, True, False, True]
    assert (model.expert_layers, model.dense_ffn_size, model.ffn_hidden_size) == (2, 96, 768)
    kimi = resolve_model("kimi-k2")
    assert (kimi.expert_layers, kimi.router_groups, kimi.shared_expert_size, kimi.has_experts(0)) == (60, 1, 2048, False)


def test_llama_4() -> None:
    scout, maverick = resolve_model("llama-4-scout-17b-16e"), resolve_model("llama-4-maverick-17b-128e")
    assert windowed(scout) == "www." * 12
    assert scout.chunked_attention and scout.sliding_window == 8192
    assert [scout.is_rotated(layer) for layer in range(4)] == [True, True, True, False]
    assert (scout.query_temperature, scout.temperature_span, scout.rope_theta) == (0.1, 8192, 5e5)
    assert (scout.head_norm, maverick.head_norm) == (HeadNorm.ROTATED, HeadNorm.NONE)
    assert (scout.expert_layers, maverick.expert_layers, maverick.dense_ffn_size) == (48, 24, 16384)
    assert [maverick.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    plain = spec("llama4_text", attn_temperature_tuning=False, attention_chunk_size=None, moe_layers=[1, 3], no_rope_layers=[])
    assert (plain.query_temperature, plain.chunked_attention, windowed(plain)) == (0.0, False, "......")
    assert [plain.has_experts(layer) for layer in range(6)] == [False, True, False, True, False, False]
    assert spec("llama4_text", attn_temperature_tuning=4).query_temperature == 0.1
    kinds = ["full_attention", "chunked_attention", "chunked_attention"] * 2
    assert windowed(spec("llama4_text", layer_types=kinds)) == ".ww.ww"


def test_latent_attention() -> None:
    model = resolve_model("deepseek-v3")
    assert (model.head_dim, model.value_size, model.rotated_size, model.num_key_value_heads) == (192, 128, 64, 128)
    assert model.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    products = 6 * model.num_layers * 128 * (192 + 128)
    assert model.flops_per_token(2048) - model.flops_per_token(1024) == pytest.approx(products * 1024)


def test_norms_limits_and_factors() -> None:
    gemma = spec("gemma2", attn_logit_softcapping=None)
    assert (gemma.norm_place, gemma.zero_centered_norms, gemma.layer_norms) == (NormPlace.BOTH, True, 4)
    assert (gemma.attention_softcap, gemma.output_softcap, gemma.embedding_scale) == (0.0, 30.0, 8.0)
    assert spec("olmo2").head_norm is HeadNorm.WIDTH
    assert spec("granite", logits_scaling=8.0).output_scale == 0.125


@pytest.mark.parametrize(
    ("family", "more", "line"),
    [
        (
            "deepseek_v9",
            {},
            "model_type: 'deepseek_v9' is not a supported family; give hf:CONFIG for Hugging Face's own module",
        ),
        ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide 4 attention heads"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types: is not a list of 6 strings, one for each layer"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 6}, "layer_types: 'chunked_attention' is not supported"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 6}, "layer_types: 'sliding_attention' is not supported"),
        ("llama4_text", {"attention_chunk_size": -1}, "attention_chunk_size: -1 is not an integer of at least 0"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers: is not a list of 6 flags"),
        ("llama", {"rope_scaling": {"type": "ntk"}}, "rope_type: 'ntk' is not supported; use one of default, linear, llama3"),
        ("llama", {"rope_scaling": {"type": "llama3"}}, "factor: is missing"),
        ("llama", {"rope_scaling": 4}, "rope_scaling: 4 is not a table"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 8}},
            "rope_scaling: has 3 factors; give 8, one for each pair of dimensions",
        ),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers: is not a list of integers of at least 0"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not supported"),
        ("deepseek_v2", {"num_experts_per_tok": 2, "moe_layer_freq": 2}, "moe_layer_freq: is not supported; leave it out"),
        ("deepseek_v3", {"n_group": 7}, "router_groups: 4 of 7 groups of 256 experts cannot be chosen; give a divisor"),
        ("deepseek_v3", {"topk_group": 9}, "router_groups: 9 of 8 groups of 256 experts cannot be chosen"),
        ("deepseek_v3", {"topk_group": 1, "n_group": 64}, "experts_per_token: 8 are more than 1 groups have"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave: rotations of halves are not supported"),
        ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank: -1 is not an integer of at least 0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: a model whose tokens attend"),
        ("granite", {"logits_scaling": 0}, "logits_scaling: 0 is not a positive number"),
    ],
)
def test_what_contradicts_is_named_in_one_line(family: str, more: dict[str, Any], line: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        spec(family, **more)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
