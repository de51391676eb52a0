"""The number of settings in which configurations depart from the base of their space.

Equations count a knob's purpose but not its full cost: hooks, copies, one more event to wait for. If predictions cannot
distinguish configurations, the one with the fewest changed settings is the better guess, and easier to read.
"""

from functools import partial

import numpy as np

from autotune.prediction.fitting.knob_features import Numbers
from autotune.strategies.guided.described import Array
from search_spaces.knob import Value
from search_spaces.space import SearchSpace

PENALTY = 0.01
"""Subtracted from the logarithm of a rate for each setting that differs from the base."""


def penalties(space: SearchSpace, numbers: Numbers, count: int) -> Array:
    """(n,) The penalty subtracted from the logarithm of each configuration's rate."""
    settings = np.zeros(count)
    for name, values in space.domains.items():
        if len(values) > 1:
            settings += numbers(name, partial(_departs, getattr(space.base, name)))
    return PENALTY * settings


def _departs(base: Value, value: Value) -> float:
    return float(value != base)
