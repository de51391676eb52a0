"""Models of rows: what a row's name says of experts, latent attention, windows and heads that its columns do not.

A table has the layers, widths and heads of a model, and may have its experts. If a row has the name of a preset that columns do
not describe, it is that preset, with the sizes that the row states in place of the preset's.
"""

import re
from dataclasses import replace
from functools import cache
from typing import Any

from autotune.knowledge.row import Row
from search_spaces.models.huggingface import model_preset_names, plain_name, resolve_model
from search_spaces.models.model import ModelSpec
from search_spaces.preset_files import preset_tables

STATED = {
    "num_layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}  # fmt: skip
"""Column -> field of a model."""
EXPERTS = {
    "experts": "num_experts", "topk": "experts_per_token", "moe_ffn": "ffn_hidden_size", "shared_expert": "shared_expert_size",
}  # fmt: skip
"""Column of a model's experts -> field."""
_DENSE_WIDTHS = ("moe_intermediate_size", "intermediate_size_mlp")
"""Keys of presets whose dense layers have another width than their experts: sources state either as `ffn_hidden`."""


def named_model(row: Row) -> ModelSpec | None:
    """The preset that a row names, with the sizes that the row states, if columns do not describe it or the row states none of
    them; None: the columns suffice.

    Raises:
        ModelFormatError: the preset cannot have these sizes.
    """
    name = _preset(plain_name((row.model_name or "").rpartition("/")[2]))
    if name is None or (row.experts == 0 and resolve_model(name).num_experts):
        return None
    preset = resolve_model(name)
    if (row.num_layers or row.hidden or row.heads) and not beyond_columns(preset):
        return None
    sizes: dict[str, Any] = {
        field: getattr(row, column) for column, field in (STATED | EXPERTS).items() if getattr(row, column) is not None
    }
    if row.ffn_hidden and "ffn_hidden_size" not in sizes and not set(_DENSE_WIDTHS) & set(preset_tables("models")[name]):
        sizes["ffn_hidden_size"] = row.ffn_hidden
    hidden, heads = row.hidden or preset.hidden_size, row.heads or preset.num_attention_heads
    if preset.latent:  # sources state one key-value head, or as many as heads
        sizes["num_key_value_heads"] = heads
    elif preset.head_dim * preset.num_attention_heads == preset.hidden_size:
        sizes["head_dim"] = hidden // heads
    if row.dense_first_layers is not None and preset.dense_ffn_size:
        layers = row.num_layers or preset.num_layers
        sizes["dense_layers"] = tuple(layer < row.dense_first_layers for layer in range(layers))
    if row.experts and row.experts % preset.router_groups:
        sizes |= {"router_groups": 1, "router_groups_kept": 1}
    return replace(preset, **sizes)


def completed(row: Row) -> Row:
    """The row with the columns of the model that it names, where it states none.

    Raises:
        ModelFormatError: as `named_model`.
    """
    model = named_model(row)
    if model is None:
        return row
    known = {column: getattr(model, field) for column, field in STATED.items() if getattr(row, column) is None}
    return replace(row, **known) if known else row


def beyond_columns(model: ModelSpec) -> bool:
    """Whether the columns that every table has cannot describe the model."""
    width = model.num_attention_heads * model.head_dim
    return bool(model.num_experts or model.latent or model.sliding_window or width != model.hidden_size)


def expert_share(row: Row) -> float:
    """Layers with experts as a share of all, by columns: a pattern of 0 and 1 as Megatron-LM writes it, every so many layers,
    or all but the first."""
    layers, pattern = row.num_layers or 1, row.moe_layer_freq or "1"
    terms = re.findall(r"\[([01,\s]+)\](?:\s*\*\s*(\d+))?", pattern)
    flags = "".join(re.sub(r"[^01]", "", values) * int(times or 1) for values, times in terms)
    if flags:
        return flags.count("1") / len(flags)
    if pattern.isdigit() and int(pattern) > 1:
        return len(range(0, layers, int(pattern))) / layers
    return max(layers - (row.dense_first_layers or 0), 0) / layers


@cache
def _preset(letters: str) -> str | None:
    """The preset with the longest name at the beginning of these letters, unless a number goes on behind it."""
    names = {plain_name(name): name for name in model_preset_names()}
    matching = [name for name in names if letters.startswith(name) and not letters[len(name) :][:1].isdigit()]
    return names[max(matching, key=len)] if matching else None
