"""The charts beside a live table: as they look, what each mark is, and where there are none."""

import dataclasses
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import table
from rich.console import Console
from rich.text import Text

from autotune.cli.foreground import LiveTable
from autotune.cli.live_charts import Canvas, LiveCharts, charts
from autotune.loop.loop import run_job
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.outcome.verdict import decide
from autotune.request.job_fields import Objective
from autotune.request.rows import request_to_row
from autotune.session.session import Session
from search_spaces.outcome import Outcome
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.store import Store, open_store
from tests.sampling import sampled

GOLDEN = Path(__file__).parent / "golden"
LIMIT = 6_000_000
Made = Callable[..., tuple[Session, JobSnapshot]]


def answer(config: TrialConfig) -> TrialResult:
    """The table's; stage 1 is ended early at times, stage 3 of micro-batch 1 does not fit."""
    result = table.measured(config)
    if config.zero_stage == 1 and config.micro_batch_size == 2:
        bound = Interval(mean=100.0, low=90.0, high=110.0)
        return dataclasses.replace(result, outcome=Outcome.PRUNED, samples_per_second=bound)
    if config.zero_stage == 3 and config.micro_batch_size == 1:
        return table.ended(Outcome.INFEASIBLE, "does not fit")
    return result


def ran(folder: Path, store: Store, result: Any = answer, **changes: Any) -> tuple[Session, JobSnapshot]:
    session = table.session(folder, **{"trials": 24, "memory_limit": LIMIT, "strategy": "grid", **changes})
    job = store.jobs.create(request_to_row(session.request))
    run_job(session, store, job.id, table.runner(result))
    return session, read_snapshot(store, job.id)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[tuple[Session, JobSnapshot]]:
    """The job that most tests look at, which is run once."""
    folder = tmp_path_factory.mktemp("usual")
    with open_store(str(shutil.copy(migrated, folder / "jobs.db"))) as store:
        yield ran(folder, store)


@pytest.fixture
def made(tmp_path: Path, store: Store, usual: tuple[Session, JobSnapshot]) -> Made:
    """A job that has run."""

    def run(*result: Any, **changes: Any) -> tuple[Session, JobSnapshot]:
        return ran(tmp_path, store, *result, **changes) if result or changes else usual

    return run


def lines_of(session: Session, snapshot: JobSnapshot, width: int, height: int) -> list[Text]:
    return charts(session, snapshot, decide(snapshot, session.ranking, session.prior, session.baselines), width, height)


def drawn(session: Session, snapshot: JobSnapshot, width: int, height: int) -> str:
    return "\n".join(line.plain.rstrip() for line in lines_of(session, snapshot, width, height)) + "\n"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (64, 24)])
def test_they_look_as_they_did(made: Made, width: int, height: int) -> None:
    """Write the files anew with AUTOTUNE_WRITE_GOLDEN=1."""
    path = GOLDEN / f"live-charts-{width}x{height}.txt"
    text = drawn(*made(), width, height)
    if os.environ.get("AUTOTUNE_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("width", "height"), [(76, 20), (80, 24), (60, 20), (200, 60)])
def test_no_line_is_wider_than_the_terminal_and_the_table_keeps_half_of_it(made: Made, width: int, height: int) -> None:
    lines = lines_of(*made(), width, height)
    assert lines
    assert max(line.cell_len for line in lines) <= width
    assert len(lines) <= max(height // 2, 10)


def test_what_searches_for_memory_draws_the_least_so_far(made: Made) -> None:
    session, snapshot = made(objective=Objective.MEMORY)
    text = drawn(session, snapshot, 120, 40)
    assert "lowest peak memory of a rank so far" in text
    assert "best samples/s" not in text


@pytest.mark.prove
def test_a_limit_far_off_is_told_and_not_drawn(made: Made) -> None:
    text = drawn(*made(memory_limit=10**9), 120, 40)
    assert "┊ limit 954 MiB" in text
    assert text.count("┊") == 1


@pytest.mark.prove
def test_one_trial_is_a_chart_and_none_is_not(made: Made) -> None:
    assert "★" in drawn(*made(trials=1, confirm_repeats=0), 80, 24)
    session, snapshot = made(result=lambda _: table.ended(Outcome.INFEASIBLE, "does not fit"))
    assert lines_of(session, snapshot, 80, 24) == []


@pytest.mark.parametrize(("width", "height"), [(59, 40), (120, 19)])
def test_there_are_none_where_there_is_no_room(made: Made, width: int, height: int) -> None:
    assert lines_of(*made(), width, height) == []


@pytest.mark.parametrize(
    ("encoding", "terminal", "able"), [("utf-8", True, True), ("latin-1", True, False), ("utf-8", False, False)]
)
def test_there_are_none_where_they_cannot_be_shown(made: Made, encoding: str, terminal: bool, able: bool) -> None:
    session, snapshot = made()
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, force_terminal=terminal, width=120, height=40, _environ={"TERM": "xterm"})
    assert bool(LiveCharts(session, console).lines(snapshot, None)) is able


def test_a_dumb_terminal_has_none(made: Made) -> None:
    session, snapshot = made()
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40, _environ={"TERM": "dumb"})
    assert LiveCharts(session, console).lines(snapshot, None) == []


def test_another_snapshot_or_size_draws_anew_and_the_same_does_not(made: Made) -> None:
    session, snapshot = made()
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=40, _environ={"TERM": "xterm"})
    seen = LiveCharts(session, console)
    first = seen.lines(snapshot, None)
    assert seen.lines(snapshot, None) is first
    console.size = (80, 24)
    assert len(seen.lines(snapshot, None)) < len(first)
    assert seen.lines(dataclasses.replace(snapshot), None) is not first


@pytest.mark.prove
@pytest.mark.parametrize(("width", "height"), sampled([(80, 24), (60, 24), (120, 40)], every=3))
def test_table_and_charts_are_never_higher_than_the_terminal(tmp_path: Path, store: Store, width: int, height: int) -> None:
    session = table.session(tmp_path, trials=14, confirm_repeats=0)
    job = store.jobs.create(request_to_row(session.request))
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height, _environ={"TERM": "xterm"})
    heights: list[int] = []

    class Measured(LiveTable):
        def _draw(self) -> None:
            super()._draw()
            if self._live is not None and self._drawing:
                heights.append(len(console.render_lines(self._live.renderable, pad=False)))

    with Measured(session, console) as live:
        run_job(session, store, job.id, table.runner(), listener=live)
    assert heights
    assert max(heights) <= height
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "samples/s over peak memory of a rank" in printed
    assert ("best samples/s so far" in printed) is (width > 60)


def test_stairs_go_level_and_then_up() -> None:
    canvas = Canvas(3, 1)
    canvas.stairs([(0.0, 0.0), (0.5, 0.99)])
    assert [line.plain for line in canvas.lines()] == ["⣀⣸⠉"]


def test_what_is_outside_stands_at_the_edge_and_the_later_covers_the_earlier() -> None:
    canvas = Canvas(3, 2)
    canvas.across(0.0, "-")
    canvas.upright(0.5, "|")
    canvas.mark((2.0, 2.0), "x")
    canvas.mark((-1.0, 0.0), "y")
    assert [line.plain for line in canvas.lines()] == [" |x", "y|-"]
