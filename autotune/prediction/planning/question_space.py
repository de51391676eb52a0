"""The space of a question's plan."""

from autotune.exports.lossless import expressible
from autotune.prediction.planning.layouts import layouts_of
from autotune.prediction.planning.question import Question
from autotune.request.engines import capability_of
from search_spaces.space import SearchSpace
from search_spaces.spaces import resolve_space


def space_of(question: Question) -> SearchSpace:
    """The space to choose from. Raises like `resolve_space` and `expressible`."""
    space = resolve_space(
        question.space, question.model, question.cluster, question.workload, capability_of(question.engine), question.pins,
        most_steps=question.most_steps, layouts=layouts_of(question.engine, question.known),
    )  # fmt: skip
    return space if question.simple is None else expressible(space, question.simple, frozenset(question.pins))
