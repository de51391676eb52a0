"""The cost of a trial: seconds of search time."""

import numpy as np

from autotune.strategies.guided.described import Array, Described
from search_spaces.trial import Fidelity

REBUILD_SECONDS = 0.15
"""Seconds of a trial on warm ranks besides its steps [docs/trial-overhead.md]."""
GROUP_SECONDS = 0.3
"""Additional seconds if process groups are rebuilt: other degrees than the previous trial."""
WARM_STEPS = 4
"""Untimed steps: warm-up, and the one whose memory is recorded."""


def trial_seconds(step_seconds: Array, fidelity: Fidelity) -> Array:
    """(n,) Seconds of trials with these step times, for the minimum number of steps of a measurement."""
    timed = np.minimum(fidelity.min_steps * step_seconds, np.maximum(fidelity.max_seconds, step_seconds))
    seconds: Array = REBUILD_SECONDS + WARM_STEPS * step_seconds + timed
    return seconds


def with_moves(described: Described, last_mesh: int | None) -> Array:
    """(n,) The cost of each trial plus that of a mesh change after the previous trial."""
    if last_mesh is None:
        return described.cost
    seconds: Array = described.cost + GROUP_SECONDS * (described.mesh != last_mesh)
    return seconds
