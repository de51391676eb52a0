"""Weights under the names of torchtitan and of Megatron-LM: exact both ways, and as their own converters make them."""

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from executor.errors import WeightsError
from executor.files.huggingface_weights import checkpoint_names, to_huggingface
from executor.files.megatron_weights import megatron_names
from executor.files.torchtitan_weights import torchtitan_names
from executor.files.weights import Names
from executor.parallel.model import build_transformer
from search_spaces.models.model import ModelSpec
from tests.executor.files.framework_models import CONFIGS, spec_of, weights_of

TITAN = ("llama", "llama, tied", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2")
CASES = [("megatron", name) for name in CONFIGS] + [("torchtitan", name) for name in TITAN]
NAMES: dict[str, Callable[[ModelSpec], Names]] = {"megatron": megatron_names, "torchtitan": torchtitan_names}


@pytest.mark.prove(every=4)
@pytest.mark.parametrize(("target", "name"), CASES)
def test_weights_are_the_same_after_both_ways(target: str, name: str) -> None:
    for modules in (0, 2) if "deepseek" in name else (0,):
        spec = spec_of(name, modules)
        names, state = NAMES[target](spec), weights_of(spec)
        theirs = names.theirs(spec, state)
        back = names.ours(spec, theirs)
        assert back.keys() == state.keys() - ({"head.output.weight"} if spec.tied_embeddings else set())
        assert all(torch.equal(value, state[key]) for key, value in back.items())
        again = names.theirs(spec, back)
        assert again.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in again.items())
        with pytest.raises(WeightsError, match="is missing"):
            names.ours(spec, {key: value for key, value in theirs.items() if "proj" not in key and "wo" not in key})


def test_megatron_keeps_the_queries_of_a_group_before_its_key_and_value() -> None:
    """2 groups of 2 query heads: q0 q1 k0 v0 q2 q3 k1 v1 (Megatron-Bridge's `merge_qkv_weights`)."""
    spec = dataclasses.replace(spec_of("qwen2"), head_dim=2, hidden_size=4)
    state = {
        name: torch.zeros(value.shape) for name, value in build_transformer(spec, 16, 0, torch.float32).state_dict().items()
    }
    for kind, heads, first in (("query", 4, 0), ("key", 2, 10), ("value", 2, 20)):
        rows = torch.arange(first, first + heads).repeat_interleave(2).float()
        state[f"blocks.0.attention.{kind}.weight"] = rows[:, None].expand(-1, 4).clone()
        state[f"blocks.0.attention.{kind}.bias"] = rows
    theirs = megatron_names(spec).theirs(spec, state)
    order = [0, 1, 10, 20, 2, 3, 11, 21]
    weight = theirs["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert weight[::2, 0].tolist() == weight[1::2, 3].tolist() == order
    assert theirs["decoder.layers.0.self_attention.linear_qkv.bias"][::2].tolist() == order


def test_megatron_joins_gate_and_up_and_numbers_experts() -> None:
    spec = spec_of("deepseek_v3", 1)
    state = weights_of(spec)
    theirs = megatron_names(spec).theirs(spec, state)
    dense = torch.cat((state["blocks.0.mlp.gate.weight"], state["blocks.0.mlp.up.weight"]))
    assert torch.equal(theirs["decoder.layers.0.mlp.linear_fc1.weight"], dense)
    expert = "predictions.0.block.mlp.experts.3"
    own = torch.cat((state[f"{expert}.gate.weight"], state[f"{expert}.up.weight"]))
    assert torch.equal(theirs["mtp.layers.0.mtp_model_layer.mlp.experts.linear_fc1.weight3"], own)
    norms = {name for name in theirs if name.startswith("decoder.layers.1.") and "norm" in name}
    assert norms == {
        f"decoder.layers.1.{name}"
        for name in (
            "input_layernorm.weight", "pre_mlp_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight",
            "self_attention.linear_kv_up_proj.layer_norm_weight",
        )
    }  # fmt: skip
    # Hugging Face's order of rotated rows, which is Megatron-LM's.
    hub = to_huggingface(spec, state)
    query = "self_attn.q_b_proj.weight"
    assert torch.equal(theirs["decoder.layers.2.self_attention.linear_q_up_proj.weight"], hub[f"model.layers.2.{query}"])


@pytest.mark.parametrize("name", TITAN)
def test_torchtitan_converts_hugging_faces_weights_to_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own adapters, from Hugging Face's names in files, where each expert has its own tensors."""
    family = {"llama, tied": "llama3", "llama": "llama3", "qwen3_moe": "qwen3", "kimi_k2": "deepseek_v3"}.get(name, name)
    if importlib.util.find_spec("triton") is None:  # kernels that are made where they are imported
        monkeypatch.setitem(sys.modules, "torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
    path = f"torchtitan.models.{family}.state_dict_adapter"
    module = pytest.importorskip(path, reason="needs torchtitan of the extra exports", exc_type=ImportError)
    kinds = [value for key, value in vars(module).items() if key.endswith("StateDictAdapter")]
    (kind,) = [value for value in kinds if value.__module__ == path]
    modules = 2 if name == "deepseek_v3" else 0
    spec = spec_of(name, modules)
    state = weights_of(spec)
    adapter = kind(_config(spec), None)
    adapter._validate_hf_rope_config = lambda _: None
    files = checkpoint_names(spec)
    made = adapter.from_hf({key: value for key, value in files.theirs(spec, state).items() if key not in files.copies})
    own = torchtitan_names(spec).theirs(spec, state)
    assert made.keys() == own.keys()
    assert all(torch.equal(value, own[key]) for key, value in made.items())


def _config(spec: ModelSpec) -> SimpleNamespace:
    """What the adapters read of torchtitan's configuration."""
    rank = 0 if spec.latent is None else spec.latent.query_rank
    attention = SimpleNamespace(
        n_heads=spec.num_attention_heads, n_kv_heads=spec.num_key_value_heads, head_dim=spec.head_dim, q_lora_rank=rank
    )
    layer = SimpleNamespace(attention=attention, moe=SimpleNamespace(num_experts=spec.num_experts))
    return SimpleNamespace(
        dim=spec.hidden_size, layers=[layer] * spec.num_layers, mtp_layers=[layer] * spec.mtp_layers,
        enable_weight_tying=spec.tied_embeddings,
    )  # fmt: skip


def test_models_that_a_framework_has_not_are_refused() -> None:
    with pytest.raises(WeightsError, match="torchtitan has no qwen2 model"):
        torchtitan_names(spec_of("qwen2"))
    with pytest.raises(WeightsError, match="no names of Megatron-LM"):
        megatron_names(dataclasses.replace(spec_of("llama"), family="olmo2"))
    with pytest.raises(WeightsError, match="has biases"):
        torchtitan_names(dataclasses.replace(spec_of("llama"), qkv_bias=True))
