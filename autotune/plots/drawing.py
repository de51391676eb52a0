"""Converts figures to plot specifications for plotly, as plain data, without importing plotly."""

from collections.abc import Callable, Mapping

from autotune.plots import bars, lines, scatters
from autotune.plots.look import MOST, Specification, empty_plot, in_dark
from autotune.wire.figures import Figure

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
    """`data` and `layout` of the figure's plot; a figure without data gives a plot with the reason."""
    found = _DRAWN[figure.name](figure) if figure else empty_plot(figure)
    specification: Specification = in_dark(found) if dark else found
    return specification


def thinning(figure: Figure) -> str:
    """A sentence about the subset that is drawn of very many trials; empty: all of them are drawn."""
    count = len(figure.tables[0]) if figure else 0
    most = _OF_TRIALS.get(figure.name, count)
    return f"Of {count:,} trials about {most} are drawn, evenly spaced." if count > most else ""


_OF_TRIALS = {
    "throughput_memory": MOST, "best_so_far": MOST, "predicted_measured": MOST, "timeline": MOST,
    "parallel_coordinates": lines.MOST_LINES,
}  # fmt: skip
