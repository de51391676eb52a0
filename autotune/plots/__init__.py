"""Plots of a job for notebooks: plotly figures, one function each.

    from autotune import plots

    plots.throughput_memory("job-id").show()

`job` is a job's id or a unique prefix of it; None: the job opened last. `database` is the URL of the database; None:
`AUTOTUNE_DB`, else the default database. The first plot imports plotly.

Raises:
    UnknownJobError: there is no such job.
    DatabaseUnavailableError: the database cannot be opened.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = [
    "all_of", "best_so_far", "knob_importance", "memory_breakdown", "module_tree", "parallel_coordinates", "pipeline_schedule",
    "predicted_measured", "response_curves", "throughput_memory", "time_breakdown", "timeline",
]  # fmt: skip


def throughput_memory(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """Samples/s against memory: trials, the limit, the Pareto front, and predicted positions of trials without a rate."""
    return _plot("throughput_memory", job, database, dark)


def best_so_far(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """The best so far, over the trials and over time."""
    return _plot("best_so_far", job, database, dark)


def parallel_coordinates(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """Every trial as a line through the values of the varying knobs."""
    return _plot("parallel_coordinates", job, database, dark)


def knob_importance(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """The share of the variance of samples/s that each knob explains."""
    return _plot("knob_importance", job, database, dark)


def predicted_measured(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """Predictions made before the first trial against measurements."""
    return _plot("predicted_measured", job, database, dark)


def timeline(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """When and on which node each trial ran."""
    return _plot("timeline", job, database, dark)


def time_breakdown(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """Where the time of a step goes: best, baseline, runner-up."""
    return _plot("time_breakdown", job, database, dark)


def memory_breakdown(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """Where the memory of a rank goes: best, baseline, runner-up."""
    return _plot("memory_breakdown", job, database, dark)


def pipeline_schedule(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """The schedule of the winner's pipeline."""
    return _plot("pipeline_schedule", job, database, dark)


def module_tree(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """The model's modules: time, FLOPs, memory."""
    return _plot("module_tree", job, database, dark)


def response_curves(job: str | None = None, database: str | None = None, *, dark: bool = False) -> "Figure":
    """The effect of each knob around the winner."""
    return _plot("response_curves", job, database, dark)


def all_of(job: str | None = None, database: str | None = None, *, dark: bool = False) -> dict[str, "Figure"]:
    """Every plot by name; a plot without data shows the reason."""
    from autotune.explain.figures.all_figures import NAMES

    return dict(_plots(NAMES, job, database, dark))


def _plot(name: str, job: str | None, database: str | None, dark: bool) -> "Figure":
    return next(found for _, found in _plots((name,), job, database, dark))


def _plots(names: Iterable[str], job: str | None, database: str | None, dark: bool) -> Iterator[tuple[str, "Figure"]]:
    from plotly.graph_objects import Figure

    from autotune.explain.figures.all_figures import figure_of
    from autotune.explain.figures.source import Source
    from autotune.plots.drawing import drawn
    from storage.address import default_database_url
    from storage.store import open_store

    with open_store(database or default_database_url()) as store:
        source = Source(store, store.job(job).id)
        for name in names:
            figure = figure_of(source, name)
            plot = Figure(drawn(figure, dark=dark))
            yield name, plot.update_layout(title={"text": figure.title, "x": 0.01}, margin={"t": 110})
