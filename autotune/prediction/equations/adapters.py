"""What configurations train beside a frozen model, as shapes: configuration by configuration."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autotune.prediction.equations.cases import Shapes
from search_spaces.adapters import adapted, adapts, layer_adapter_elements
from search_spaces.model import ModelSpec
from search_spaces.states import PARAMETER_BYTES
from search_spaces.trial_config import TrialConfig

FIELDS = ("adapter", "adapter_divided", "frozen_bytes", "low_rank", "bottleneck", "prefix", "prompt")
"""Fields of `Shapes` that say what is trained and what is frozen."""


def adapted_shapes(shapes: Shapes, model: ModelSpec, configs: Sequence[TrialConfig]) -> Shapes:
    """The shapes with what each configuration trains beside a frozen model; as they are where none does."""
    if not any(adapts(config) for config in configs):
        return shapes
    as_it_is = tuple(float(getattr(shapes, name)[0]) for name in FIELDS)
    found = [_of(model, config) if adapts(config) else as_it_is for config in configs]
    return dataclasses.replace(shapes, **dict(zip(FIELDS, np.array(found, dtype=np.float64).T, strict=True)))


def _of(model: ModelSpec, config: TrialConfig) -> tuple[float, ...]:
    """The values of FIELDS."""
    trained = adapted(model, config)
    whole, divided = layer_adapter_elements(trained)
    in_precision = config.frozen_dtype == "same"
    frozen_bytes = PARAMETER_BYTES[config.precision] if in_precision else trained.frozen_bytes
    low_rank = float(config.lora_rank > 0)
    return whole, divided, frozen_bytes, low_rank, config.adapter_size, config.prefix_length, config.prompt_length
