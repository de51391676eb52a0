"""Figures of a job, all by name in reading order: plain data, which one program draws on the page, in reports and notebooks."""

from collections.abc import Callable, Mapping
from functools import partial

from autotune.explain.figures.breakdowns import memory_breakdown, time_breakdown
from autotune.explain.figures.knob_figures import knob_importance, response_curves
from autotune.explain.figures.module_tree import module_tree
from autotune.explain.figures.pipeline_schedule import pipeline_schedule
from autotune.explain.figures.source import FigureSource, MakeFigure
from autotune.explain.figures.trial_figures import (
    best_so_far,
    parallel_coordinates,
    predicted_measured,
    throughput_memory,
    timeline,
)
from autotune.wire.figures import Figure
from search_spaces.preset_files import unknown_name

_FIGURES: Mapping[str, tuple[str, Callable[[FigureSource, MakeFigure], Figure]]] = {
    "throughput_memory": ("Throughput against memory", throughput_memory),
    "best_so_far": ("Best so far", best_so_far),
    "knob_importance": ("Which knobs matter", knob_importance),
    "response_curves": ("Around the best", response_curves),
    "parallel_coordinates": ("Knobs of the measured trials", parallel_coordinates),
    "time_breakdown": ("Where a step goes", time_breakdown),
    "memory_breakdown": ("Where the memory goes", memory_breakdown),
    "pipeline_schedule": ("Pipeline schedule of the best", pipeline_schedule),
    "module_tree": ("Modules of the model", module_tree),
    "predicted_measured": ("Predicted against measured", predicted_measured),
    "timeline": ("Trials on nodes", timeline),
}
"""Name -> title, and what makes it."""
NAMES = tuple(_FIGURES)
OF_TRIALS = ("throughput_memory", "best_so_far", "parallel_coordinates", "predicted_measured", "timeline")
"""The figures that the page draws from the trials' columns, so that points can be hovered over and walked through."""


def figure_of(source: FigureSource, name: str) -> Figure:
    """Return the figure of that name. If it has no data, its summary says why.

    Raises:
        UnknownNameError: there is no figure of that name.
    """
    if name not in _FIGURES:
        raise unknown_name("figure", name, NAMES)
    title, make = _FIGURES[name]
    return make(source, partial(Figure, name=name, title=title))
