"""All figures by name, in reading order."""

from collections.abc import Callable, Mapping

from autotune.explain.figures import (
    best_so_far,
    knob_importance,
    memory_breakdown,
    module_tree,
    parallel_coordinates,
    pipeline_schedule,
    predicted_measured,
    response_curves,
    throughput_memory,
    time_breakdown,
    timeline,
)
from autotune.explain.figures.source import FigureSource
from autotune.wire.figures import Figure
from search_spaces.preset_files import unknown_name

_FIGURES: Mapping[str, Callable[[FigureSource], Figure]] = {
    throughput_memory.NAME: throughput_memory.throughput_memory,
    best_so_far.NAME: best_so_far.best_so_far,
    knob_importance.NAME: knob_importance.knob_importance,
    response_curves.NAME: response_curves.response_curves,
    parallel_coordinates.NAME: parallel_coordinates.parallel_coordinates,
    time_breakdown.NAME: time_breakdown.time_breakdown,
    memory_breakdown.NAME: memory_breakdown.memory_breakdown,
    pipeline_schedule.NAME: pipeline_schedule.pipeline_schedule,
    module_tree.NAME: module_tree.module_tree,
    predicted_measured.NAME: predicted_measured.predicted_measured,
    timeline.NAME: timeline.timeline,
}
NAMES = tuple(_FIGURES)


def figure_of(source: FigureSource, name: str) -> Figure:
    """Return the figure of that name. If it has no data, its summary says why.

    Raises:
        UnknownNameError: there is no figure of that name.
    """
    if name not in _FIGURES:
        raise unknown_name("figure", name, NAMES)
    return _FIGURES[name](source)
