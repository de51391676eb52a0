"""Models: published parameter counts, every family's config.json, and what is said of a bad one."""

import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import ModelFormatError, UnknownNameError
from search_spaces.models.huggingface import (
    is_factory_reference,
    model_preset_names,
    model_spec_from_config,
    read_model_config,
    resolve_model,
)
from search_spaces.models.model import FactoryModel, ModelSpec, Norm, Position
from search_spaces.plain import from_plain, to_plain

PUBLISHED = {
    "llama-2-7b": 6738415616,
    "llama-2-13b": 13015864320,
    "llama-2-70b": 68976648192,
    "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496,
    "llama-3.1-405b": 405853388800,
    "mistral-7b": 7241732096,
    "mixtral-8x7b": 46702792704,
    "qwen2-7b": 7615616512,
    "qwen2-0.5b": 494032768,
    "gpt2": 124439808,
    "gpt2-medium": 354823168,
    "gpt2-xl": 1557611200,
    "opt-125m": 125239296,
    "opt-350m": 331196416,
    "opt-1.3b": 1315758080,
    "pythia-160m": 162322944,
    "gpt-neox-20b": 20554567680,
}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "vocab_size": 100,
    "max_position_embeddings": 32,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": None,
    "vocab_size": 100,
    "n_ctx": 32,
}
NEOX: dict[str, Any] = {**LLAMA, "model_type": "gpt_neox"}


def spec(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return model_spec_from_config({**config, **changes}, "test")


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_preset_has_the_published_parameter_count(name: str, count: int) -> None:
    assert resolve_model(name).parameter_count == count


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("name", model_preset_names())
def test_preset_survives_plain_data(name: str) -> None:
    model = resolve_model(name)
    assert model.name == name
    assert from_plain(ModelSpec, json.loads(json.dumps(to_plain(model)))) == model


def test_a_factory_model_survives_plain_data() -> None:
    model = FactoryModel(reference="m:f", parameter_count=10, frozen_parameter_count=3)
    assert from_plain(FactoryModel, to_plain(model)) == model


def test_demo_models_train_on_a_cpu() -> None:
    sizes = [resolve_model(name).parameter_count for name in ("llama-tiny", "llama-mini", "llama-small")]
    assert sizes == sorted(sizes)
    assert sizes[0] < 2e6
    assert sizes[-1] < 2e7


def test_flops_per_token_is_palm_appendix_b() -> None:
    model = resolve_model("llama-2-7b")
    multiplied = model.parameter_count - 32000 * 4096
    assert model.flops_per_token(4096) == 6 * multiplied + 12 * 32 * 32 * 128 * 4096


def test_mixtral_computes_two_of_eight_experts() -> None:
    assert resolve_model("mixtral-8x7b").active_parameter_count == 12_879_925_248


def test_llama_defaults() -> None:
    model = spec(LLAMA)
    assert (model.num_key_value_heads, model.head_dim, model.tied_embeddings) == (4, 16, False)
    assert (model.norm, model.norm_epsilon, model.activation, model.rope_theta) == (Norm.RMSNORM, 1e-6, "silu", 1e4)
    assert not (model.qkv_bias or model.attention_output_bias or model.mlp_bias or model.sliding_window)


def test_llama_biases_add_their_parameters() -> None:
    plain, biased = spec(LLAMA), spec(LLAMA, attention_bias=True, mlp_bias=True)
    assert biased.parameter_count - plain.parameter_count == 2 * (4 * 64 + 2 * 96 + 64)


def test_llama_states_its_head_dim_and_ties() -> None:
    model = spec(LLAMA, head_dim=32, tie_word_embeddings=True, num_key_value_heads=2)
    assert (model.head_dim, model.tied_embeddings, model.num_key_value_heads) == (32, True, 2)
    assert spec(LLAMA, head_dim=None, num_key_value_heads=None).head_dim == 16


def test_rotary_settings_in_old_and_new_form() -> None:
    assert spec(LLAMA, rope_theta=5e5).rope_theta == 5e5
    assert spec(LLAMA, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}).rope_theta == 5e5
    assert spec(NEOX, rotary_pct=0.5, rotary_emb_base=20000).rotary_fraction == 0.5
    assert spec(NEOX, rotary_emb_base=20000).rope_theta == 20000.0
    assert spec(NEOX, rope_parameters={"partial_rotary_factor": 1.0}).rotary_fraction == 1.0


def test_mistral_window_is_4096_unless_null() -> None:
    config = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
    assert spec(config).sliding_window == 4096
    assert spec(config, sliding_window=None).sliding_window == 0
    assert spec(config, sliding_window=16).sliding_window == 16


def test_qwen2_has_biases_on_queries_keys_and_values_alone() -> None:
    config = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 16}
    model = spec(config)
    assert (model.qkv_bias, model.attention_output_bias, model.sliding_window) == (True, False, 0)
    assert spec(config, use_sliding_window=True).sliding_window == 0, "the first 28 layers have none"
    assert spec(config, use_sliding_window=True, max_window_layers=0).sliding_window == 16


def test_gpt2_defaults() -> None:
    model = spec(GPT2)
    assert (model.ffn_hidden_size, model.sequence_length, model.tied_embeddings) == (256, 32, True)
    assert (model.activation, model.position, model.norm) == ("gelu_tanh", Position.LEARNED, Norm.LAYERNORM)
    assert spec(GPT2, n_inner=128, activation_function="relu").ffn_hidden_size == 128


def test_opt_defaults_and_its_350m_form() -> None:
    model = spec(OPT)
    assert (model.tied_embeddings, model.position_offset, model.final_norm, model.embedding_size) == (True, 2, True, 0)
    odd = spec(OPT, word_embed_proj_dim=16, do_layer_norm_before=False)
    assert (odd.embedding_size, odd.final_norm) == (16, False)
    assert spec(OPT, word_embed_proj_dim=64).embedding_size == 0
    assert not spec(OPT, enable_bias=False).qkv_bias


def test_gpt_neox_defaults() -> None:
    model = spec(NEOX)
    assert (model.rotary_fraction, model.parallel_residual, model.tied_embeddings) == (0.25, True, False)
    assert spec(NEOX, attention_bias=False).qkv_bias is False
    assert spec(NEOX, attention_bias=False).mlp_bias is True
    assert spec(NEOX, use_parallel_residual=False).parallel_residual is False


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 66}, "num_attention_heads"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"model_type": "bert"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({**LLAMA, "model_type": {}}, "model_type"),
        ({"model_type": [], "text_config": {"model_type": {}}}, "model_type"),
    ],
)
def test_bad_config_names_the_key_in_one_line(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        spec(LLAMA, **changes)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_what_no_spec_can_express_is_refused() -> None:
    for config, key, value in (
        (OPT, "_remove_final_layer_norm", True),
        (OPT, "layer_norm_elementwise_affine", False),
        (GPT2, "add_cross_attention", True),
    ):
        with pytest.raises(ModelFormatError, match=key):
            spec(config, **{key: value})


def test_config_is_read_from_a_file_and_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert resolve_model(str(folder)) == read_model_config(folder / "config.json")
    assert resolve_model(str(folder)).name == "my-llama"


@pytest.mark.parametrize("content", ["{", "[]", '"llama"', "\x00"])
def test_a_file_that_is_no_json_object(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        resolve_model(str(file))


def test_a_missing_file_is_told_from_an_unknown_preset() -> None:
    with pytest.raises(ModelFormatError, match="no such file"):
        resolve_model("nowhere/config.json")
    with pytest.raises(UnknownNameError, match="llama-2-7b"):
        resolve_model("llama2-7b")


def test_factory_references() -> None:
    assert is_factory_reference("mymodel:build")
    assert is_factory_reference("pkg.mod:Class.make")
    assert not any(map(is_factory_reference, ("llama-tiny", "dgx-a100:4", "a/b:c", ":f", "m:")))


def test_the_refusal_of_an_unknown_family_names_what_trains_it() -> None:
    with pytest.raises(
        ModelFormatError, match="'gemma' is not a supported family; give hf:CONFIG for Hugging Face's own module"
    ):
        spec(LLAMA, model_type="gemma")


GEMMA3 = {"model_type": "gemma3_text", "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 256}


def test_sizes_that_a_file_leaves_out_are_those_of_the_class_and_noted() -> None:
    model = spec(GEMMA3)
    assert (model.vocab_size, model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (262_208, 8, 4, 256)
    assert model.sequence_length == 131_072
    (note,) = model.notes
    for size in ("vocab_size 262,208", "num_attention_heads 8", "max_position_embeddings 131,072"):
        assert size in note
    stated = spec(GEMMA3, vocab_size=262_208, num_attention_heads=8, max_position_embeddings=131_072)
    assert (stated, stated.notes) == (model, ())
    assert spec({"model_type": "gpt2"}).parameter_count == PUBLISHED["gpt2"]
    assert spec({"model_type": "opt"}).parameter_count == PUBLISHED["opt-125m"]
    with pytest.raises(ModelFormatError, match="num_hidden_layers: is missing"):
        spec({"model_type": "kimi_k2"})


@pytest.mark.parametrize(
    ("wrapper", "text"),
    [
        ("gemma3", GEMMA3),
        ("llama4", {**LLAMA, "model_type": "llama4_text", "num_key_value_heads": 2}),
        ("mistral3", {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}),
        ("of-a-later-release", LLAMA),
    ],
)
def test_the_text_model_of_a_model_that_reads_images(wrapper: str, text: dict[str, Any]) -> None:
    whole = {"model_type": wrapper, "text_config": text, "vision_config": {"hidden_size": 32}, "torch_dtype": "bfloat16"}
    model = spec(whole)
    assert model == spec(text)
    assert model.notes[0] == "the text model alone, without vision_config"
    assert spec(whole, tie_word_embeddings=True).tied_embeddings


def test_a_text_model_of_an_unknown_family_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="'mllama' is not a supported family"):
        spec({"model_type": "mllama", "text_config": {**LLAMA, "model_type": "mllama_text_model"}})


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, 4),
        ({"load_in_8bit": True, "load_in_4bit": False}, 8),
        ({"bits": 4, "group_size": 128, "quant_method": "gptq"}, 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 16),
    ],
)
def test_quantised_weights(quantization: dict[str, Any], bits: int) -> None:
    model = spec(LLAMA, quantization_config=quantization)
    assert model.frozen_bits == bits
    assert "quantization_config" in model.notes[0] and "--frozen-bits" in model.notes[0]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_the_text_model_of_a_file_without_text_config(kind: str) -> None:
    """As old files have it: the keys of the text model beside those of the images, whose positions turn by sections."""
    flat = {**LLAMA, "model_type": kind, "vision_config": {"depth": 2}, "num_key_value_heads": 2}
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    model = spec(flat, rope_scaling=rope)
    assert (model.family, model.rope_theta, model.norm_epsilon, model.rope_scaling) == ("qwen2", 1e6, 1e-5, None)
    assert model.notes == ("the text model alone, without vision_config",)
    nested = {"model_type": kind, "vision_config": {}, "text_config": {**flat, "model_type": f"{kind}_text"}}
    assert spec(nested, rope_scaling=rope).parameter_count == model.parameter_count


def test_the_whole_model_decides_whether_the_output_projection_is_the_table() -> None:
    """As in transformers 5."""
    text = {**LLAMA, "tie_word_embeddings": False}
    whole = {"model_type": "llava", "text_config": text, "vision_config": {}}
    assert not spec(whole).tied_embeddings
    assert spec(whole, tie_word_embeddings=True).tied_embeddings


def test_code_of_the_file_itself_is_not_read() -> None:
    model = spec(LLAMA, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    assert model.parameter_count == spec(LLAMA).parameter_count
    assert model.notes == ("the class of llama in transformers, not the code that auto_map names",)
