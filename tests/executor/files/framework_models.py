"""Small models whose weights other frameworks have, and their weights."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from executor.parallel.model import build_transformer
from search_spaces.models.huggingface import model_spec_from_config
from search_spaces.models.model import ModelSpec

SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
    "deepseek_v2": {**DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": {**DEEPSEEK, "model_type": "deepseek_v3"},
    "kimi_k2": {**DEEPSEEK, "model_type": "kimi_k2"},
}  # fmt: skip


def spec_of(name: str, modules: int = 0) -> ModelSpec:
    return dataclasses.replace(model_spec_from_config({**SHAPE, **CONFIGS[name]}, "small"), mtp_layers=modules)


def weights_of(spec: ModelSpec) -> dict[str, Tensor]:
    state = build_transformer(spec, 16, seed=0, dtype=torch.float64).state_dict()
    generator = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(value.shape, dtype=value.dtype, generator=generator) for name, value in state.items()}
    if spec.tied_embeddings:
        drawn["head.output.weight"] = drawn["embedding.tokens.weight"]
    return drawn
