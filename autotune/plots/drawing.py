"""Figures as plots: the specification that plotly draws, in plain data, without loading plotly."""

from collections.abc import Callable, Mapping

from autotune.explain.figures.figure import Figure
from autotune.plots import bars, lines, scatters
from autotune.plots.look import MOST, Specification, in_dark, nothing

_DRAWN: Mapping[str, Callable[[Figure], Specification]] = {
    "throughput_memory": scatters.throughput_memory,
    "best_so_far": lines.best_so_far,
    "knob_importance": bars.knob_importance,
    "response_curves": lines.response_curves,
    "parallel_coordinates": lines.parallel_coordinates,
    "time_breakdown": bars.time_breakdown,
    "memory_breakdown": bars.memory_breakdown,
    "pipeline_schedule": bars.pipeline_schedule,
    "module_tree": bars.module_tree,
    "predicted_measured": scatters.predicted_measured,
    "timeline": bars.timeline,
}


def drawn(figure: Figure, *, dark: bool = False) -> Specification:
    """`data` and `layout` of the figure's plot; of one that there is nothing for, why."""
    found = _DRAWN[figure.name](figure) if figure else nothing(figure)
    told: Specification = in_dark(found) if dark else found
    return told


def thinning(figure: Figure) -> str:
    """What of a figure of very many trials is drawn, in a sentence; empty: all of it."""
    count = len(figure.tables[0]) if figure else 0
    most = _OF_TRIALS.get(figure.name, count)
    return f"Of {count:,} trials some {most} are drawn, chosen evenly." if count > most else ""


_OF_TRIALS = {
    "throughput_memory": MOST, "best_so_far": MOST, "predicted_measured": MOST, "timeline": MOST,
    "parallel_coordinates": lines.MOST_LINES,
}  # fmt: skip
