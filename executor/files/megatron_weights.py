"""Weights of Megatron-LM's GPTModel as ours, and back: names and shapes of its `state_dict` with Transformer Engine's layers,
on one rank, as Megatron-Bridge maps them (commit 067f987d). Tables have exactly the model's vocabulary; Megatron-LM pads them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from executor.errors import WeightsError
from executor.files.weights import ROWS, Names, Together, Weight, joined, pair, rotated_halves
from search_spaces.models.model import HeadNorm, Latent, ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2")
"""Families that Megatron-Bridge maps and GPTModel computes as we do."""


def megatron_names(spec: ModelSpec) -> Names:
    """The tensors of Megatron-LM's GPTModel.

    Raises:
        WeightsError: Megatron-Bridge does not map such a model.
    """
    if spec.family not in FAMILIES:
        raise WeightsError(f"{spec.family} has no names of Megatron-LM here: give one of {', '.join(FAMILIES)}")
    if spec.attention_output_bias or spec.mlp_bias or (spec.qkv_bias and spec.latent is not None):
        raise WeightsError(f"{spec.name} has biases that Megatron-Bridge does not map: give a model without")
    return Names(weights=tuple(_weights(spec)))


def by_query_groups(queries: int, groups: int) -> Together:
    """Queries, keys and values in one matrix: the query heads of the first group, its key head, its value head, then those of
    the second group, and so on."""
    each = queries // groups

    def join(parts: Sequence[Tensor]) -> Tensor:
        query, key, value = (part.view(groups, -1, *part.shape[1:]) for part in parts)
        return torch.cat((query, key, value), dim=1).flatten(0, 1)

    def split(tensor: Tensor, _: Sequence[int]) -> Sequence[Tensor]:
        heads = tensor.view(groups, each + 2, -1, *tensor.shape[1:])
        return [part.flatten(0, 2) for part in torch.split(heads, [each, 1, 1], dim=1)]

    return Together(join, split)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    yield from pair("embedding.word_embeddings", "embedding.tokens")
    for layer in range(spec.num_layers):
        yield from _layer(spec, layer, f"decoder.layers.{layer}", f"blocks.{layer}")
    for depth in range(spec.mtp_layers):
        theirs, ours = f"mtp.layers.{depth}", f"predictions.{depth}"
        names = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "project", "final_layernorm": "norm"}
        for other, own in names.items():
            yield from pair(f"{theirs}.{other}", f"{ours}.{own}")
        yield from _layer(spec, spec.num_layers + depth, f"{theirs}.mtp_model_layer", f"{ours}.block")
    yield from pair("decoder.final_layernorm", "head.norm")
    if not spec.tied_embeddings:
        yield from pair("output_layer", "head.output")


def _layer(spec: ModelSpec, layer: int, theirs: str, ours: str) -> Iterator[Weight]:
    """A norm belongs to the matrix that reads it, unless several do."""
    attention, own = f"{theirs}.self_attention", f"{ours}.attention"
    yield from pair(f"{attention}.linear_proj", f"{own}.output")
    if spec.latent is not None:
        yield from pair(f"{theirs}.input_layernorm", f"{ours}.attention_norm")
        yield from _latent(spec, spec.latent, attention, own)
    else:
        yield _norm(f"{attention}.linear_qkv", f"{ours}.attention_norm")
        together = by_query_groups(spec.num_attention_heads, spec.num_key_value_heads)
        names = [f"{own}.{name}" for name in ("query", "key", "value")]
        yield from joined(f"{attention}.linear_qkv", names, (), spec.qkv_bias, together)
    if spec.head_norm is not HeadNorm.NONE:
        yield from pair(f"{attention}.q_layernorm", f"{own}.query_norm")
        yield from pair(f"{attention}.k_layernorm", f"{own}.key_norm")
    if spec.has_experts(layer):
        yield from pair(f"{theirs}.pre_mlp_layernorm", f"{ours}.mlp_norm")
        yield from _experts(spec, f"{theirs}.mlp", f"{ours}.mlp")
    else:
        yield _norm(f"{theirs}.mlp.linear_fc1", f"{ours}.mlp_norm")
        yield from _mlp(f"{theirs}.mlp", f"{ours}.mlp", spec.dense_ffn_size or spec.ffn_hidden_size)


def _norm(theirs: str, ours: str) -> Weight:
    return Weight(f"{theirs}.layer_norm_weight", (f"{ours}.weight",))


def _latent(spec: ModelSpec, latent: Latent, theirs: str, ours: str) -> Iterator[Weight]:
    """Megatron-LM rotates neighbours in latent attention, as DeepSeek does; we rotate halves."""
    query = "linear_q_proj"
    if latent.query_rank:
        query = "linear_q_up_proj"
        yield from pair(f"{theirs}.linear_q_down_proj", f"{ours}.query_down")
        yield _norm(f"{theirs}.linear_q_up_proj", f"{ours}.query_latent_norm")
    yield from joined(f"{theirs}.{query}", [f"{ours}.query"], (), False, rotated_halves(spec.head_dim, latent.rotated))
    one = rotated_halves(latent.key_value_rank + latent.rotated, latent.rotated)
    yield from joined(f"{theirs}.linear_kv_down_proj", [f"{ours}.key_value_down"], (), False, one)
    yield _norm(f"{theirs}.linear_kv_up_proj", f"{ours}.key_value_latent_norm")
    yield from pair(f"{theirs}.linear_kv_up_proj", f"{ours}.key_value")


def _mlp(theirs: str, ours: str, width: int) -> Iterator[Weight]:
    """Gate and up in one matrix."""
    yield from joined(f"{theirs}.linear_fc1", [f"{ours}.gate", f"{ours}.up"], (width, width), False, ROWS)
    yield from pair(f"{theirs}.linear_fc2", f"{ours}.down")


def _experts(spec: ModelSpec, theirs: str, ours: str) -> Iterator[Weight]:
    """As grouped matrices of Transformer Engine: one tensor for each expert, its number after the name."""
    yield from pair(f"{theirs}.router", f"{ours}.router")
    if spec.router_correction:
        yield Weight(f"{theirs}.router.expert_bias", (f"{ours}.correction",))
    if spec.shared_expert_size:
        yield from _mlp(f"{theirs}.shared_experts", f"{ours}.shared", spec.shared_expert_size)
    for expert in range(spec.num_experts):
        own, width = f"{ours}.experts.{expert}", spec.ffn_hidden_size
        both = (f"{own}.gate.weight", f"{own}.up.weight")
        yield Weight(f"{theirs}.experts.linear_fc1.weight{expert}", both, (width, width), ROWS)
        yield Weight(f"{theirs}.experts.linear_fc2.weight{expert}", (f"{own}.down.weight",))
