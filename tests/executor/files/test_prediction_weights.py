"""Weights of modules for multi-token prediction under the names of DeepSeek-V3's and GLM-4.5's published checkpoints."""

import dataclasses

import pytest
import torch

from executor.errors import WeightsError
from executor.files.huggingface_weights import from_huggingface, to_huggingface
from executor.parallel.model import build_transformer
from search_spaces.models.huggingface import model_spec_from_config, resolve_model
from search_spaces.models.model import ModelSpec

SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 64, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def spec_of(family: str, modules: int) -> ModelSpec:
    extra = {**LATENT, "first_k_dense_replace": 1} if family == "deepseek_v3" else {"head_dim": 8}
    spec = model_spec_from_config({**SHAPE, **extra, "model_type": family}, "small")
    assert spec.mtp_layers == 0  # as transformers reads it
    return dataclasses.replace(spec, mtp_layers=modules)


@pytest.mark.parametrize(("family", "modules"), [("deepseek_v3", 1), ("glm4_moe", 2)])
def test_modules_are_layers_after_the_model(family: str, modules: int) -> None:
    spec = spec_of(family, modules)
    model = build_transformer(spec, 16, seed=0, dtype=torch.float64)
    written = to_huggingface(spec, model.state_dict())
    further = {name.removeprefix("model.layers.3.") for name in written if name.startswith("model.layers.3.")}
    assert {
        "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "shared_head.head.weight",
        "embed_tokens.weight", "input_layernorm.weight", "mlp.gate.weight", "mlp.shared_experts.up_proj.weight",
    } <= further  # fmt: skip
    layer = {name.removeprefix("model.layers.2.") for name in written if name.startswith("model.layers.2.")}
    assert layer < further  # a layer of the last one's kind
    assert written["model.layers.3.eh_proj.weight"].shape == (32, 64)
    back = from_huggingface(spec, written)
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(value, back[name]) for name, value in model.state_dict().items())


def test_copies_of_tables_may_be_left_out_but_not_differ() -> None:
    spec = spec_of("deepseek_v3", 1)
    written = to_huggingface(spec, build_transformer(spec, 16, seed=0, dtype=torch.float64).state_dict())
    name = "model.layers.3.shared_head.head.weight"
    from_huggingface(spec, {key: value for key, value in written.items() if key != name})
    with pytest.raises(WeightsError, match="differs from lm_head"):
        from_huggingface(spec, {**written, name: written[name] + 1})
    with pytest.raises(WeightsError, match="is missing"):
        from_huggingface(spec, {key: value for key, value in written.items() if "eh_proj" not in key})


def test_deepseek_v3_with_its_module_has_the_parameters_of_the_published_checkpoint() -> None:
    """684,489,830,400 elements in bf16 and fp8, which include the module's copies of both tables; 671 billion without it."""
    plain = resolve_model("deepseek-v3")
    spec = dataclasses.replace(plain, mtp_layers=1)
    assert round(plain.parameter_count / 1e9) == 671
    assert spec.parameter_count + 2 * spec.vocab_size * spec.hidden_size == 684_489_830_400
    assert spec.parameter_count - plain.parameter_count == spec.mtp_parameters
