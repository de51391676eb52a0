"""What a trial costs: the seconds that the search spends."""

import numpy as np

from autotune.strategies.guided.described import Array, Described
from search_spaces.trial import Fidelity

REBUILD_SECONDS = 0.15
"""Of a trial on warm ranks beside its steps [docs/trial-overhead.md]."""
GROUP_SECONDS = 0.3
"""More where process groups are made anew: other degrees than the trial before."""
WARM_STEPS = 4
"""Steps that are not timed: warm-up, and the one whose memory is accounted for."""


def trial_seconds(step_seconds: Array, fidelity: Fidelity) -> Array:
    """(n,) Seconds of trials whose steps take so long, by the fewest steps that a measurement takes."""
    timed = np.minimum(fidelity.min_steps * step_seconds, np.maximum(fidelity.max_seconds, step_seconds))
    told: Array = REBUILD_SECONDS + WARM_STEPS * step_seconds + timed
    return told


def with_moves(described: Described, last_mesh: int | None) -> Array:
    """(n,) The cost of each with what moving to it costs, from the mesh of the trial before."""
    if last_mesh is None:
        return described.cost
    told: Array = described.cost + GROUP_SECONDS * (described.mesh != last_mesh)
    return told
