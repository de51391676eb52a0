"""Shapes of the adapters that configurations train on top of a frozen model."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autotune.prediction.equations.cases import Shapes
from search_spaces.models.model import ModelSpec
from search_spaces.training.adapters import adapted, adapts, layer_adapter_elements
from search_spaces.training.states import PARAMETER_BYTES
from search_spaces.trial_config import TrialConfig

FIELDS = ("adapter", "adapter_divided", "frozen_bytes", "low_rank", "bottleneck", "prefix", "prompt")
"""Fields of `Shapes` that describe trained and frozen parameters."""


def adapted_shapes(shapes: Shapes, model: ModelSpec, configs: Sequence[TrialConfig]) -> Shapes:
    """Add each configuration's trained adapters to the shapes; unchanged if there are none."""
    if not any(adapts(config) for config in configs):
        return shapes
    unchanged = tuple(float(getattr(shapes, name)[0]) for name in FIELDS)
    found = [_of(model, config) if adapts(config) else unchanged for config in configs]
    return dataclasses.replace(shapes, **dict(zip(FIELDS, np.array(found, dtype=np.float64).T, strict=True)))


def _of(model: ModelSpec, config: TrialConfig) -> tuple[float, ...]:
    """The values of FIELDS."""
    trained = adapted(model, config)
    whole, divided = layer_adapter_elements(trained)
    in_precision = config.frozen_dtype == "same"
    frozen_bytes = PARAMETER_BYTES[config.precision] if in_precision else trained.frozen_bytes
    low_rank = float(config.lora_rank > 0)
    return whole, divided, frozen_bytes, low_rank, config.adapter_size, config.prefix_length, config.prompt_length
