"""Weights of torchtitan's models as ours, and back: names and shapes of its `state_dict` (those of torchtitan 0.3.0).

torchtitan rotates neighbours in Llama, halves in Qwen3; we rotate halves.
"""

from collections.abc import Iterator

from executor.errors import WeightsError
from executor.files.weights import STACKED, Names, Weight, joined, pair, rotated_halves
from search_spaces.models.model import HeadNorm, Latent, ModelSpec

FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2")
"""Families whose models torchtitan has."""


def torchtitan_names(spec: ModelSpec) -> Names:
    """The tensors of torchtitan's model.

    Raises:
        WeightsError: torchtitan has no such model.
    """
    if spec.family not in FAMILIES:
        raise WeightsError(f"torchtitan has no {spec.family} model: give one of {', '.join(FAMILIES)}")
    if spec.qkv_bias or spec.attention_output_bias or spec.mlp_bias:
        raise WeightsError(f"{spec.name} has biases, which torchtitan's models have not: give a model without")
    copies = {"lm_head.weight": "tok_embeddings.weight"} if spec.tied_embeddings else {}
    return Names(weights=tuple(_weights(spec)), copies=copies)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    yield from pair("tok_embeddings", "embedding.tokens")
    for layer in range(spec.num_layers):
        yield from _layer(spec, layer, f"layers.{layer}", f"blocks.{layer}")
    for depth in range(spec.mtp_layers):
        theirs, ours = f"mtp_layers.{depth}", f"predictions.{depth}"
        names = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "project", "mtp_norm": "norm"}
        for other, own in names.items():
            yield from pair(f"{theirs}.{other}", f"{ours}.{own}")
        yield from _layer(spec, spec.num_layers + depth, theirs, f"{ours}.block")
    yield from pair("norm", "head.norm")
    if not spec.tied_embeddings:
        yield from pair("lm_head", "head.output")


def _layer(spec: ModelSpec, layer: int, theirs: str, ours: str) -> Iterator[Weight]:
    yield from pair(f"{theirs}.attention_norm", f"{ours}.attention_norm")
    yield from pair(f"{theirs}.ffn_norm", f"{ours}.mlp_norm")
    yield from pair(f"{theirs}.attention.wo", f"{ours}.attention.output")
    if spec.latent is not None:
        yield from _latent(spec, spec.latent, f"{theirs}.attention", f"{ours}.attention")
    else:
        yield from _attention(spec, f"{theirs}.attention", f"{ours}.attention")
    if spec.has_experts(layer):
        yield from _experts(spec, f"{theirs}.moe", f"{ours}.mlp")
    else:
        yield from _mlp(f"{theirs}.feed_forward", f"{ours}.mlp")


def _attention(spec: ModelSpec, theirs: str, ours: str) -> Iterator[Weight]:
    for own, other in {"query": "wq", "key": "wk"}.items():
        if spec.family == "llama":
            turned = rotated_halves(spec.head_dim, spec.head_dim)
            yield from joined(f"{theirs}.qkv_linear.{other}", [f"{ours}.{own}"], (), False, turned)
        else:
            yield from pair(f"{theirs}.qkv_linear.{other}", f"{ours}.{own}")
    yield from pair(f"{theirs}.qkv_linear.wv", f"{ours}.value")
    if spec.head_norm is not HeadNorm.NONE:
        yield from pair(f"{theirs}.q_norm", f"{ours}.query_norm")
        yield from pair(f"{theirs}.k_norm", f"{ours}.key_norm")


def _latent(spec: ModelSpec, latent: Latent, theirs: str, ours: str) -> Iterator[Weight]:
    query = "wq"
    if latent.query_rank:
        query = "wq_b"
        yield from pair(f"{theirs}.wq_a", f"{ours}.query_down")
        yield from pair(f"{theirs}.q_norm", f"{ours}.query_latent_norm")
    yield from joined(f"{theirs}.{query}", [f"{ours}.query"], (), False, rotated_halves(spec.head_dim, latent.rotated))
    one = rotated_halves(latent.key_value_rank + latent.rotated, latent.rotated)
    yield from joined(f"{theirs}.wkv_a", [f"{ours}.key_value_down"], (), False, one)
    yield from pair(f"{theirs}.kv_norm", f"{ours}.key_value_latent_norm")
    yield from pair(f"{theirs}.wkv_b", f"{ours}.key_value")


MATRICES = {"w1": "gate", "w3": "up", "w2": "down"}


def _mlp(theirs: str, ours: str) -> Iterator[Weight]:
    for other, own in MATRICES.items():
        yield from pair(f"{theirs}.{other}", f"{ours}.{own}")


def _experts(spec: ModelSpec, theirs: str, ours: str) -> Iterator[Weight]:
    """Grouped matrices [experts, rows, columns]; the last letters of their names are the dimensions."""
    yield from pair(f"{theirs}.router.gate", f"{ours}.router")
    if spec.router_correction:
        yield Weight(f"{theirs}.expert_bias_E", (f"{ours}.correction",))
    if spec.shared_expert_size:
        yield from _mlp(f"{theirs}.shared_experts", f"{ours}.shared")
    for other, own in MATRICES.items():
        name = f"{theirs}.routed_experts.inner_experts.{other}_{'EDF' if own == 'down' else 'EFD'}"
        experts = tuple(f"{ours}.experts.{expert}.{own}.weight" for expert in range(spec.num_experts))
        yield Weight(name, experts, together=STACKED)
