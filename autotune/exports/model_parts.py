"""Parts of a model that a target's built-in model may lack."""

from collections.abc import Callable, Collection, Mapping

from search_spaces.models.model import ModelSpec

PARTS: Mapping[str, Callable[[ModelSpec], bool]] = {
    "experts": lambda shape: shape.num_experts > 0,
    "a capacity of experts": lambda shape: shape.capacity_factor > 0,
    "a load-balance loss": lambda shape: shape.load_balance > 0,
    "tied embeddings": lambda shape: shape.tied_embeddings,
    "norms after the sub-layers": lambda shape: not shape.pre_norm,
    "parallel residuals": lambda shape: shape.parallel_residual,
    "a sliding window": lambda shape: shape.sliding_window > 0,
    "projected embeddings": lambda shape: shape.embedding_size > 0,
    "adapters": lambda shape: shape.adapts,
}
"""Name of the part in notes -> whether a model has it."""


def lacking(shape: ModelSpec, built_in: Collection[str]) -> list[str]:
    """The model's parts that the target's built-in model lacks."""
    return [part for part, has in PARTS.items() if part not in built_in and has(shape)]
