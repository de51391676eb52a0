"""Low-rank adapters that configurations ask for, as shapes: what is trained and frozen, configuration by configuration."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from autotune.prediction.cases import Shapes
from search_spaces.adapters import adapted, layer_adapter_elements
from search_spaces.model import ModelSpec
from search_spaces.states import PARAMETER_BYTES
from search_spaces.trial_config import TrialConfig


def adapted_shapes(shapes: Shapes, model: ModelSpec, configs: Sequence[TrialConfig]) -> Shapes:
    """The shapes with adapters for each configuration that asks for some; as they are where none does."""
    if not any(config.lora_rank for config in configs):
        return shapes
    as_it_is = (float(shapes.adapter[0]), float(shapes.adapter_divided[0]), float(shapes.frozen_bytes[0]))
    found = [_of(model, config) if config.lora_rank else as_it_is for config in configs]
    adapter, divided, frozen_bytes = np.array(found, dtype=np.float64).T
    return dataclasses.replace(shapes, adapter=adapter, adapter_divided=divided, frozen_bytes=frozen_bytes)


def _of(model: ModelSpec, config: TrialConfig) -> tuple[float, float, float]:
    """Adapter parameters of a layer that are whole on tensor-parallel ranks and that these divide; bytes of a frozen one."""
    trained = adapted(model, config)
    in_precision = config.frozen_dtype == "same"
    return (*layer_adapter_elements(trained), PARAMETER_BYTES[config.precision] if in_precision else trained.frozen_bytes)
