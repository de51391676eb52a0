"""Models that a row names and its columns do not describe: with experts, latent attention, windows, or heads of another width.

A table has the layers, widths and heads of a dense model. If a row has the name of a preset, and the row states nothing
else than the preset, the preset says what the columns lack.
"""

from dataclasses import replace
from functools import cache

from autotune.evaluation.validation.row import Row
from search_spaces.models.huggingface import model_preset_names, plain_name, resolve_model
from search_spaces.models.model import ModelSpec

STATED = {
    "num_layers": "num_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}  # fmt: skip
"""Column -> field of a model. `ffn_hidden` is not compared: sources state the experts' width or that of the dense layers."""
PADDED = 1.02
"""Largest ratio of a stated vocabulary to the model's: software pads it."""


def named_model(row: Row) -> ModelSpec | None:
    """The preset that a row names, if columns do not describe it or the row states none of them; None: the columns suffice."""
    preset = _preset(plain_name((row.model_name or "").rpartition("/")[2]))
    if preset is None:
        return None
    states_nothing = not (row.num_layers or row.hidden or row.heads)
    return preset if (states_nothing or beyond_columns(preset)) and _agrees(row, preset) else None


def completed(row: Row) -> Row:
    """The row with the columns of the model that it names, where it states none."""
    model = named_model(row)
    if model is None:
        return row
    known = {column: getattr(model, field) for column, field in STATED.items() if getattr(row, column) is None}
    return replace(row, **known) if known else row


def beyond_columns(model: ModelSpec) -> bool:
    """Whether a table's columns cannot describe the model."""
    width = model.num_attention_heads * model.head_dim
    return bool(model.num_experts or model.latent or model.sliding_window or width != model.hidden_size)


def _agrees(row: Row, model: ModelSpec) -> bool:
    """Whether the row states nothing else than the model."""
    for column, field in STATED.items():
        stated, known = getattr(row, column), getattr(model, field)
        if stated is None or stated == known or (column == "vocab" and known < stated <= known * PADDED):
            continue
        # Sources state one key-value head, or as many as heads, for latent attention.
        if not (column == "kv_heads" and model.latent):
            return False
    return True


@cache
def _preset(letters: str) -> ModelSpec | None:
    """The preset with the longest name at the beginning of these letters, unless a number goes on behind it."""
    names = {plain_name(name): name for name in model_preset_names()}
    found = [name for name in names if letters.startswith(name) and not letters[len(name) :][:1].isdigit()]
    return resolve_model(names[max(found, key=len)]) if found else None
