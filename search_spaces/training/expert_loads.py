"""How unevenly tokens choose their experts: stated loads, choices that follow them, and the rows of the busiest rank."""

import math
import random
from collections.abc import Sequence
from functools import lru_cache

from search_spaces.models.model import Model, ModelSpec

Loads = tuple[tuple[float, ...], ...]
"""The load of each expert, in any unit: one row for all layers with experts, or one for each of these. Empty: not stated."""
MOST = 1000
"""Rows, and numbers in a row, at most."""


def loads_problem(loads: Loads, model: Model) -> tuple[str, str] | None:
    """Why tokens of the model cannot follow the loads, and the remedy; None: they can, or none are stated."""
    if not loads:
        return None
    if not isinstance(model, ModelSpec) or not model.num_experts:
        return f"{model.name} has no experts of ours", "leave it out, or give a preset or a config.json with experts"
    if model.load_balance:
        return (
            f"the load_balance of {model.name} works against stated loads",
            "leave output_router_logits out of its config.json",
        )
    remedy = "give a row of one number for each expert, for all layers with experts or one row for each of them"
    if len(loads) not in (1, model.expert_layers):
        return f"has {len(loads)} rows, and {model.name} has {model.expert_layers} layers with experts", remedy
    for index, row in enumerate(loads):
        if len(row) != model.num_experts:
            return f"row {index + 1} has {len(row)} numbers, and {model.name} has {model.num_experts} experts", remedy
        if not all(0 <= load < math.inf for load in row) or not sum(row):
            return f"row {index + 1} has a number that is negative or not finite, or no load", "give counts or shares of tokens"
        most = max(row) / sum(row) * model.experts_per_token
        if most > 1 + 1e-9:
            problem = f"an expert in row {index + 1} would be chosen {most:.3g} times by each token"
            return problem, f"give no expert more than 1 / {model.experts_per_token} of a row, the experts of a token"
    return None


def layer_shares(model: ModelSpec, layer: int) -> tuple[float, ...]:
    """The share of all choices of a layer with experts that each expert gets; they sum to 1.

    Layers after the last one, of multi-token prediction, follow its row.
    """
    index = sum(model.has_experts(before) for before in range(layer))
    row = model.expert_loads[min(index, len(model.expert_loads) - 1)]
    return tuple(load / sum(row) for load in row)


def expert_counts(shares: Sequence[float], tokens: int, choices: int) -> list[int]:
    """How many of `tokens` tokens choose each expert, none more than all of them: `choices` each, by largest remainders."""
    exact = [min(share * tokens * choices, tokens) for share in shares]
    counts = [math.floor(count + 1e-9) for count in exact]
    order = sorted(range(len(counts)), key=lambda expert: counts[expert] - exact[expert])
    while unassigned := tokens * choices - sum(counts):
        for expert in [expert for expert in order if counts[expert] < tokens][:unassigned]:
            counts[expert] += 1
    return counts


@lru_cache(maxsize=256)
def drawn_choices(model: ModelSpec, layer: int, tokens: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """The experts of each token of a sample in a layer, which follow the loads exactly, up to rounding.

    1. Write each expert as often as it is to be chosen, one expert after the other. Token i gets the entries i, i + tokens,
       and so on: no expert twice, since none is written more than `tokens` times.
    2. Shuffle the tokens by the seed and the layer. All samples have the same choices, so that no layout changes them.
    """
    counts = expert_counts(layer_shares(model, layer), tokens, model.experts_per_token)
    entries = [expert for expert, count in enumerate(counts) for _ in range(count)]
    chosen = [tuple(entries[token::tokens]) for token in range(tokens)]
    random.Random(f"experts:{seed}:{layer}").shuffle(chosen)
    return tuple(chosen)


@lru_cache(maxsize=1024)
def busiest(model: ModelSpec, ranks: int) -> tuple[float, float]:
    """Rows of the busiest of `ranks` ranks that divide the experts, relative to even ones: the mean over the layers of each
    layer's busiest rank, which the others wait for, and the mean of the rank that has the most in all layers.

    With a capacity every rank has equally many rows.
    """
    if not model.expert_loads or model.capacity_factor or ranks <= 1 or model.num_experts % ranks:
        return 1.0, 1.0
    rank_experts = model.num_experts // ranks
    layers = [layer for layer in range(model.num_layers) if model.has_experts(layer)]
    rows = [
        [sum(shares[first : first + rank_experts]) * ranks for first in range(0, model.num_experts, rank_experts)]
        for shares in (layer_shares(model, layer) for layer in layers)
    ]
    return sum(map(max, rows)) / len(rows), max(map(sum, zip(*rows, strict=True))) / len(rows)
