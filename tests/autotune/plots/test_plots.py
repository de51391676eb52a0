"""Plots as plotly takes them: of any job, and with text that stays text."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from swept import swept, waiting

from autotune import plots
from autotune.explain.figures.all_figures import NAMES
from autotune.explain.figures.figure import Unit, column, table
from autotune.explain.figures.palette import DARK, LIGHT
from autotune.plots.drawing import drawn, thinning
from autotune.plots.look import MOST
from autotune.wire.figures import Figure
from storage.errors import UnknownJobError
from storage.store import Store

HOSTILE = "<b onmouseover=alert(1)>x</b><a href='https://evil.example'>y</a>&lt;"


def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'jobs.db'}"


def texts_of(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts_of(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in texts_of(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.prove
def test_all_plots_of_a_job(tmp_path: Path, store: Store) -> None:
    job = swept(tmp_path, store)
    found = plots.all_of(job, database(tmp_path))
    assert tuple(found) == NAMES
    for name in set(NAMES) - {"pipeline_schedule"}:
        assert found[name].data, name  # plotly itself has checked every field
    alone = plots.throughput_memory(job[:-1], database(tmp_path), dark=True)
    used = set(texts_of(alone.to_plotly_json())) & ({*LIGHT.values()} | {*DARK.values()})
    assert used
    assert used <= {*DARK.values()}


def test_a_job_without_trials_says_so(tmp_path: Path, store: Store) -> None:
    found = plots.best_so_far(waiting(tmp_path, store), database(tmp_path))
    assert not found.data
    assert "no trial has started" in found.layout.annotations[0].text
    with pytest.raises(UnknownJobError):
        plots.timeline("nothing", database(tmp_path))


def figure(rows: int) -> Figure:
    """A timeline whose node has a hostile name."""
    names = [HOSTILE] * rows
    columns = [
        column("node", "node", names), column("trial", "trial", range(rows)), column("attempt", "attempt", [1] * rows),
        column("outcome", "outcome", ["OK"] * rows), column("purpose", "purpose", ["search"] * rows),
        column("started", "started", range(rows), Unit.SECONDS), column("finished", "ended", range(1, rows + 1), Unit.SECONDS),
    ]  # fmt: skip
    return Figure(name="timeline", title="t", summary="s.", tables=(table("attempts", "an attempt", columns),))


def test_names_are_text() -> None:
    told = texts_of(drawn(figure(3)))
    assert [text for text in told if "<a" in text or "<b on" in text] == []
    assert [text for text in told if "&lt;a href" in text] != []


def test_very_many_trials_are_thinned_and_that_is_said() -> None:
    many = figure(20 * MOST)
    assert sum(len(trace["y"]) for trace in drawn(many)["data"]) <= MOST
    assert f"{20 * MOST:,}" in thinning(many)
    assert thinning(figure(3)) == ""


@pytest.mark.prove
def test_plotly_is_loaded_by_the_first_plot_alone() -> None:
    program = "import sys; from autotune import plots; import autotune.plots.drawing; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
