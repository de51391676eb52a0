"""The space of a question's plan."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autotune.errors import RequestError
from autotune.frameworks.exporters import expressible
from autotune.prediction.planning.question import Question
from autotune.request.engines import capability_of
from search_spaces.space import SearchSpace
from search_spaces.spaces import resolve_space


def space_of(question: Question) -> SearchSpace:
    """The space to choose from. Raises like `resolve_space` and `expressible`."""
    space = resolve_space(
        question.space, question.model, question.cluster, question.workload, capability_of(question.engine), question.pins,
        most_steps=question.most_steps, layouts=layouts_of(question.engine, question.coefficients),
    )  # fmt: skip
    return space if question.simple is None else expressible(space, question.simple, frozenset(question.pins))


if TYPE_CHECKING:
    from autotune.prediction.equations.coefficients import Coefficients


def layouts_of(engine: str, rates: "Coefficients | None" = None) -> Callable[[SearchSpace], Sequence[str]]:
    """Return a function that proposes layouts for an engine's space."""

    def propose(space: SearchSpace) -> Sequence[str]:
        # Imports NumPy, SciPy and the equations: only when layouts are requested.
        from autotune.prediction.planning.solved_layouts import solved_layouts

        return solved_layouts(space, engine, rates)

    return propose


def nothing_legal(space: SearchSpace) -> RequestError:
    """Return why the space is empty: what refuses its simplest configuration, else what refuses most of the others."""
    refusals = space.check(
        space.base.replace(
            {name: values[0] for name, values in space.domains.items() if getattr(space.base, name) not in values}
        )
    )
    if not refusals:
        rule = next(iter(space.census().refused), "")
        example = space.refused_example(rule)
        refusals = [refusal for refusal in space.check(example) if refusal.rule == rule] if example else []
    why = f": {refusals[0].message}" if refusals else ""
    remedy = f"{refusals[0].remedy}; `autotune space` shows which rules refuse them" if refusals else "give it other values"
    field = "global_batch_size" if refusals and refusals[0].rule == "batch-divides" else "space"
    return RequestError(field, f"{space.name} has no legal configuration{why}", remedy)
