"""Parts of a model that a target's built-in model may lack."""

from collections.abc import Callable, Collection, Mapping

from search_spaces.models.model import CLAMPED, HeadNorm, ModelSpec, NormPlace

PARTS: Mapping[str, Callable[[ModelSpec], bool]] = {
    "experts": lambda shape: shape.num_experts > 0,
    "a capacity of experts": lambda shape: shape.capacity_factor > 0,
    "a load-balance loss": lambda shape: shape.load_balance > 0,
    "tied embeddings": lambda shape: shape.tied_embeddings,
    "norms after the sub-layers": lambda shape: shape.norm_place is NormPlace.SUM,
    "parallel residuals": lambda shape: shape.parallel_residual,
    "norms of the sub-layers' outputs": lambda shape: shape.norm_place in (NormPlace.OUTPUT, NormPlace.BOTH),
    "norms that multiply by 1 + their weight": lambda shape: shape.zero_centered_norms,
    "norms of queries and keys": lambda shape: shape.head_norm is not HeadNorm.NONE,
    "limits of scores": lambda shape: max(shape.attention_softcap, shape.output_softcap) > 0,
    "sinks of attention": lambda shape: shape.attention_sinks,
    "a bias of the router": lambda shape: shape.router_bias,
    "a gate that is limited": lambda shape: shape.activation == CLAMPED,
    "factors of scores, embeddings, residuals or logits": lambda shape: (
        shape.attention_scale not in (0.0, shape.head_dim**-0.5)
        or not shape.embedding_scale == shape.residual_scale == shape.output_scale == 1
    ),
    "factors of queries by position": lambda shape: shape.query_temperature > 0,
    "layers without rotary positions": lambda shape: not all(shape.rotated_layers),
    "scaled rotary positions": lambda shape: shape.rope_scaling is not None,
    "router weights of which the sum is not 1": lambda shape: shape.num_experts > 0 and not shape.normalised_routing,
    "latent attention": lambda shape: shape.latent is not None,
    "shared experts": lambda shape: shape.shared_expert_size > 0,
    "dense layers beside those with experts": lambda shape: any(shape.dense_layers),
    "weights of experts that are sigmoids": lambda shape: shape.sigmoid_routing,
    "a bias of the choice of experts": lambda shape: shape.router_correction,
    "groups of experts": lambda shape: shape.router_groups > 1,
    "a factor of experts' weights": lambda shape: shape.routing_scale != 1,
    "experts whose weights multiply their inputs": lambda shape: shape.weighted_inputs,
    "a sliding window": lambda shape: shape.sliding_window > 0 and not shape.chunked_attention,
    "attention within chunks": lambda shape: shape.chunked_attention,
    "projected embeddings": lambda shape: shape.embedding_size > 0,
    "adapters": lambda shape: shape.adapts,
}
"""Name of the part in notes -> whether a model has it."""


def lacking(shape: ModelSpec, built_in: Collection[str]) -> list[str]:
    """The model's parts that the target's built-in model lacks."""
    return [part for part, has in PARTS.items() if part not in built_in and has(shape)]
