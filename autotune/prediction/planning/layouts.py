"""The layouts for `pipeline_layout = "solved"`, determined when a space is resolved."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from search_spaces.space import SearchSpace

if TYPE_CHECKING:
    from autotune.prediction.equations.coefficients import Coefficients


def layouts_of(engine: str, known: "Coefficients | None" = None) -> Callable[[SearchSpace], Sequence[str]]:
    """Return a function that proposes layouts for an engine's space."""

    def propose(space: SearchSpace) -> Sequence[str]:
        # Imports NumPy, SciPy and the equations: only when layouts are requested.
        from autotune.prediction.planning.solved_layouts import solved_layouts

        return solved_layouts(space, engine, known)

    return propose
