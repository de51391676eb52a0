"""What a model may have that a target's built-in one has not."""

from collections.abc import Callable, Collection, Mapping

from search_spaces.model import ModelSpec

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
"""Part, as a note names it -> whether a model has it."""


def lacking(shape: ModelSpec, built_in: Collection[str]) -> list[str]:
    """The parts of the model that are none of those that the target has built in."""
    return [part for part, has in PARTS.items() if part not in built_in and has(shape)]
