"""Presets against what was published, and readers against the configuration classes of transformers."""

import json
from typing import Any

import pytest

from search_spaces.models.huggingface import FAMILIES, model_preset_names, model_spec_from_config, resolve_model
from search_spaces.models.named import model_names, named_config
from search_spaces.preset_files import preset_tables

OWN = ("llama-tiny", "llama-mini", "llama-small")
PUBLISHED = {
    "gpt2": 0.124, "gpt2-medium": 0.355, "gpt2-xl": 1.56, "opt-125m": 0.125, "opt-350m": 0.331, "opt-1.3b": 1.3,
    "pythia-160m": 0.162, "gpt-neox-20b": 20.6, "llama-2-7b": 6.74, "llama-2-13b": 13.0, "llama-2-70b": 69.0,
    "llama-3-8b": 8.03, "llama-3-70b": 70.6, "llama-3.1-405b": 406.0, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21,
    "mistral-7b": 7.24, "mistral-nemo-12b": 12.2, "mistral-small-24b": 23.6, "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141.0, 39.2), "qwen2-0.5b": 0.49, "qwen2-7b": 7.62, "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.8, "qwen2.5-32b": 32.8, "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6, "qwen3-1.7b": 1.7, "qwen3-4b": 4.0, "qwen3-8b": 8.2, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235.0, 22.0), "phi-3-mini": 3.8, "phi-3-medium": 14.0, "phi-4": 14.7,
    "phi-4-mini": 3.8, "olmo-2-1b": 1.48, "olmo-2-7b": 7.3, "olmo-2-13b": 13.7, "olmo-2-32b": 32.2, "olmo-3-7b": 7.3,
    "olmo-3-32b": 32.2, "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2, "gemma-3-270m": 0.268, "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88, "gemma-3-12b": 11.8, "gemma-3-27b": 27.0, "gpt-oss-20b": (20.9, 3.6), "gpt-oss-120b": (116.8, 5.1),
    "granite-3-2b": 2.53, "granite-3-8b": 8.17,
    "smollm3-3b": 3.08, "deepseek-v2-lite": (15.7, 2.4), "deepseek-v2": (236.0, 21.0), "deepseek-v3": (671.0, 37.0),
    "llama-4-scout-17b-16e": (108.0, 17.0), "llama-4-maverick-17b-128e": (400.0, 17.0),
}  # fmt: skip
"""Preset -> billions of parameters on its model card or in its report; with experts, total and active ones. Llama 4
without the 0.87 of its vision encoder, with which Scout has the published 109."""
BY_THEIR_CLASS = ("kimi-k2", "glm-4.5", "glm-4.5-air")
"""Published figures are rounded (1T, 32B active) or include the layers of multi-token prediction (355B, 106B)."""
SIZES = {
    "num_hidden_layers": 30, "hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 32, "vocab_size": 64,
    "max_position_embeddings": 8192,
}  # fmt: skip
CLASSES = {"kimi_k2": "deepseek_v3"}
"""Family -> that of the class, if it has another name."""
OF_FAMILY: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 64},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gpt2": {"n_layer": 30, "n_embd": 256, "n_head": 4, "n_positions": 8192, "vocab_size": 64},
}


def as_published(billions: float) -> Any:
    """What a count in billions equals that was published with as many digits."""
    digits = len(f"{billions:g}".replace(".", "").lstrip("0"))
    return pytest.approx(billions, rel=max(0.6 * 10 ** (1 - digits), 0.005))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    published = PUBLISHED[name]
    model = resolve_model(name)
    # The reports of GPT-OSS and DeepSeek-V2 count no input embedding among the active ones.
    without = model.family in ("gpt_oss", "deepseek_v2")
    active = model.active_parameter_count - (model.input_embedding_parameters if without else 0)
    counted = (model.parameter_count, active)
    for count, billions in zip(counted, published if isinstance(published, tuple) else (published, published), strict=True):
        assert count / 1e9 == as_published(billions)


def test_every_preset_of_others_is_compared() -> None:
    assert {*PUBLISHED, *BY_THEIR_CLASS, *OWN} == set(model_preset_names())


def test_every_family_has_presets() -> None:
    assert {preset["model_type"] for preset in preset_tables("models").values()} == set(FAMILIES)


@pytest.mark.parametrize("name", model_names())
def test_a_model_has_as_many_parameters_as_its_class(name: str) -> None:
    """By its keys here, and by the file that transformers publishes, without keys that equal the class's defaults."""
    transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
    import torch

    named = named_config(name)
    assert named is not None
    config = named[0]
    for key in ("sliding_window", "q_lora_rank"):
        if config.get(key) == 0:
            config[key] = None
    config["model_type"] = CLASSES.get(config["model_type"], config["model_type"])
    of_class = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(of_class)
    count = sum(parameter.numel() for parameter in theirs.parameters())
    published = model_spec_from_config(json.loads(of_class.to_json_string(use_diff=True)), name)
    assert (resolve_model(name).parameter_count, published.parameter_count) == (count, count)


@pytest.mark.parametrize("family", FAMILIES)
def test_omitted_keys_have_the_defaults_of_the_class(family: str) -> None:
    """Read from a file that states the sizes alone, and from the one that transformers writes, which states everything."""
    transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
    short = {"model_type": family, **OF_FAMILY.get(family, {})}
    if family in CLASSES:
        pytest.skip(f"transformers has no class of {family}, whose class is {CLASSES[family]}'s")
    short = short if family == "gpt2" else {**SIZES, **short}
    whole = transformers.AutoConfig.for_model(**short).to_dict()
    assert model_spec_from_config(whole, "it") == model_spec_from_config(short, "it")


@pytest.mark.parametrize("family", preset_tables("class_sizes"))
def test_omitted_sizes_are_those_of_the_class(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
    whole = transformers.AutoConfig.for_model(family)
    sizes = preset_tables("class_sizes")[family]
    assert sizes == {key: getattr(whole, key) for key in sizes}
    assert len(sizes) == (5 if family == "gpt2" else 6)


@pytest.mark.parametrize(
    "wrapper", ["gemma3", "llama4", "mistral3", "llava", "internvl", "qwen3_asr", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
)
def test_the_text_model_of_a_larger_model_is_that_of_its_class(wrapper: str) -> None:
    """From the file that transformers writes of the whole model, and from its text model's own."""
    transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
    whole = transformers.AutoConfig.for_model(wrapper)
    text = {**whole.text_config.to_dict(), "tie_word_embeddings": getattr(whole, "tie_word_embeddings", False)}
    for file in ({**whole.to_dict(), "text_config": text}, json.loads(whole.to_json_string(use_diff=True))):
        model = model_spec_from_config(file, "it")
        assert model == model_spec_from_config(text, "it")
        assert any("the text model alone, without" in note for note in model.notes)
