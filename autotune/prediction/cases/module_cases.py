"""A user's module as cases: its profile, and the shapes of a transformer of its size for what a profile does not say."""

import dataclasses
import math
from functools import lru_cache

from autotune.errors import RequestError
from autotune.prediction.equations.cases import DescribedModule, Shapes, scalar
from search_spaces.models.command import CommandModel
from search_spaces.models.model import FactoryModel, Model, ModelSpec
from search_spaces.models.module_profile import ModuleProfile, traced_precision
from search_spaces.space import SearchSpace


def transformer_of(model: FactoryModel | CommandModel, sequence_length: int, least_layers: int = 1) -> ModelSpec:
    """A transformer with about as many parameters: the only fact known of a script, and sometimes not even that.

    Trials correct what it predicts.
    """
    count = model.parameter_count / 12  # a layer of width h has 12 h² [Kaplan 2020, 2.1]
    stages = _blocks(model)
    if stages > 1:
        layers = stages
        width = max(round(math.sqrt(count / layers) / 64), 1) * 64
    else:
        # In transformers of all sizes, width is roughly 64 times the number of layers.
        width = max(round((count * 64) ** (1 / 3) / 64), 1) * 64
        layers = max(round(count / width**2), least_layers)
    return ModelSpec(
        name=model.name, family="factory", num_layers=layers, hidden_size=width, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, head_dim=64, ffn_hidden_size=4 * width, vocab_size=max(math.isqrt(width), 2),
        sequence_length=sequence_length, tied_embeddings=True, gated_mlp=False,
    )  # fmt: skip


def _blocks(model: FactoryModel | CommandModel) -> int:
    if isinstance(model, CommandModel):
        return 1
    return model.pipeline_stages if model.profile is None else len(model.profile.block_names)


def module_shapes(shapes: Shapes, model: FactoryModel) -> Shapes:
    """The shapes of `transformer_of(model)` with as many layers as the module has blocks; what is frozen is in the profile."""
    blocks = max(_blocks(model), 1)
    return dataclasses.replace(shapes, layers=scalar(blocks), frozen_bytes=scalar(0.0), vocabulary=scalar(0.0))


def predictable(model: Model, space: SearchSpace) -> ModelSpec | FactoryModel | None:
    """The model if the equations know it: by its shape, or by its profile in all precisions of the space; else None."""
    if isinstance(model, ModelSpec):
        return model
    if not isinstance(model, FactoryModel) or model.profile is None:
        return None
    precisions = map(str, space.domains.get("precision", (space.base.precision,)))
    return model if all(traced_precision(precision) in model.profile.traces for precision in precisions) else None


def described(model: Model, precision: str, device_kind: str) -> DescribedModule | None:
    """The module in the precision; None: the model is not a module with a profile.

    Raises:
        RequestError: its profile has no trace in the precision.
    """
    if not isinstance(model, FactoryModel) or model.profile is None:
        return None
    traced = traced_precision(precision)
    if traced not in model.profile.traces:
        precisions = ", ".join(model.profile.traces)
        raise RequestError(
            "precision", f"{model.name} is described in {precisions}, not in {precision}", f"use one of {precisions}"
        )
    return _described(model.profile, traced, device_kind == "cpu")


@lru_cache(maxsize=64)
def _described(profile: ModuleProfile, precision: str, copies: bool) -> DescribedModule:
    return DescribedModule(profile=profile, precision=precision, copies=copies)
