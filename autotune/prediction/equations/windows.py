"""Attention windows of configurations as shapes: keys that a token reads, for each configuration."""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autotune.prediction.equations.cases import Shapes
from search_spaces.models.model import ModelSpec
from search_spaces.training.windows import Window, window_of, windowed
from search_spaces.trial_config import TrialConfig


def windowed_shapes(shapes: Shapes, model: ModelSpec, sequence_length: int, configs: Sequence[TrialConfig]) -> Shapes:
    """Add the window of each configuration to the shapes; unchanged without windows."""
    if not any(config.attention_window for config in configs):
        return shapes
    windows = [window_of(windowed(model, config)) for config in configs]
    read, copied = ([of(window, sequence_length) for window in windows] for of in (keys_read, keys_copied))
    return dataclasses.replace(shapes, window=np.array(read, dtype=np.float64), copied=np.array(copied, dtype=np.float64))


@lru_cache(maxsize=1024)
def keys_copied(window: Window, sequence_length: int) -> float:
    """The value of `Shapes.copied`."""
    return window.copied_keys(sequence_length) / sequence_length if window.hides(sequence_length) else 0.0


@lru_cache(maxsize=1024)
def keys_read(window: Window, sequence_length: int) -> float:
    """The value of `Shapes.window`: by the visited blocks if the window hides anything, else the sequence."""
    if not window.hides(sequence_length):
        return float(sequence_length)
    return min(window.visited_pairs(sequence_length) / sequence_length, sequence_length - 1.0)
