"""What `pipeline_layout = "solved"` stands for, where a space is resolved."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from search_spaces.space import SearchSpace

if TYPE_CHECKING:
    from autotune.prediction.equations.coefficients import Coefficients


def layouts_of(engine: str, known: "Coefficients | None" = None) -> Callable[[SearchSpace], Sequence[str]]:
    """What proposes layouts for a space that an engine is to train in."""

    def propose(space: SearchSpace) -> Sequence[str]:
        # NumPy, SciPy and the equations: loaded for those who ask for layouts alone.
        from autotune.prediction.planning.solved_layouts import solved_layouts

        return solved_layouts(space, engine, known)

    return propose
