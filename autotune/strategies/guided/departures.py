"""How far configurations depart from the base of their space.

Equations count what a knob is for, and not all that it costs: hooks, copies, one more thing to wait for. Where predictions
cannot tell configurations apart, the one with the fewest settings of its own is the better guess, and easier to read.
"""

from functools import partial

import numpy as np

from autotune.prediction.fitting.knob_features import Numbers
from autotune.strategies.guided.described import Array
from search_spaces.space import SearchSpace
from search_spaces.trial_config import Value

DOUBT = 0.01
"""Of the logarithm of a rate, for each setting that is not the base's."""


def doubts(space: SearchSpace, numbers: Numbers, count: int) -> Array:
    """(n,) What is taken off the logarithm of each one's rate."""
    settings = np.zeros(count)
    for name, values in space.domains.items():
        if len(values) > 1:
            settings += numbers(name, partial(_departs, getattr(space.base, name)))
    return DOUBT * settings


def _departs(base: Value, value: Value) -> float:
    return float(value != base)
