"""The config.json of a tiny model of each family, with every mechanism of the family."""

from collections.abc import Mapping
from typing import Any

SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
    "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
LATENT: Mapping[str, Any] = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
OWN: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": 16}, "mixtral": {"num_local_experts": 4}, "opt": {"ffn_dim": 96}, "qwen3_moe": EXPERTS,
    "gemma2": {"sliding_window": 16}, "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"}, "deepseek_v3": LATENT,
    "kimi_k2": {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "llama4_text": {
        "num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 128, "attention_chunk_size": 16,
        "floor_scale": 16,
    },
    "olmo3": {"sliding_window": 16}, "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
}  # fmt: skip


def tiny(family: str) -> dict[str, Any]:
    """The config.json of a tiny model of the family."""
    head = {} if family in ("gpt2", "gpt_neox", "opt", "phi3", "olmo2", "olmo3", "granite") else {"head_dim": 16}
    return {"model_type": family, **SIZES, **head, **OWN.get(family, {})}
