"""The figures of a job in a notebook, drawn by the program of the web page.

from autotune.notebook import figures

figures("job-id", "throughput_memory", "best_so_far")
"""

import html
from dataclasses import dataclass, field

__all__ = ["NotebookFigures", "figures"]


@dataclass(frozen=True, slots=True)
class NotebookFigures:
    """Figures of a job. A notebook shows them in a frame of their own, which needs no network and cannot reach the notebook."""

    text: str
    """The title and the summary of each, a line each."""
    page: str = field(repr=False)
    """An HTML file with all of them."""

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        height = 520 if self.text.count("\n") == 0 else 900
        frame = f"width:100%;height:{height}px;border:0;resize:vertical;overflow:auto"
        return f'<iframe sandbox="allow-scripts" style="{frame}" srcdoc="{html.escape(self.page)}"></iframe>'


def figures(job: str | None = None, *names: str, database: str | None = None) -> NotebookFigures:
    """The figures of these names of a job, or all of them; one without data shows the reason.

    Args:
        job: a job's id or a unique prefix of it; None: the job opened last.
        names: as in `autotune.explain.figures.NAMES`; empty: all.
        database: the URL of the database; None: `AUTOTUNE_DB`, else the default database.

    Raises:
        UnknownJobError: there is no such job.
        UnknownNameError: there is no figure of that name.
        DatabaseUnavailableError: the database cannot be opened.
    """
    from autotune.explain.figures import NAMES, OF_TRIALS, figure_of
    from autotune.explain.figures.source import FigureSource
    from autotune.reports.page import figures_page
    from storage.address import default_database_url
    from storage.store import open_store

    with open_store(database or default_database_url()) as store:
        source = FigureSource(store, store.jobs.get(job).id)
        shown = [figure_of(source, name) for name in names or NAMES]
        text = "\n".join(f"{figure.title}: {figure.summary}" for figure in shown)
        points = source.points if any(figure.name in OF_TRIALS for figure in shown) else None
        return NotebookFigures(text, figures_page(f"Job {source.job.id}", shown, points))
