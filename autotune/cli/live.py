"""The live table of a sweep on standard error: finished trials, running trials, the best so far, the remaining time.

Above it are the charts of `live_charts`, if the terminal is large enough; they keep their position when rows change.
"""

import time
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autotune.cli.live_charts import LiveCharts
from autotune.loop.job_cost import ended, most_measurements, seconds_left
from autotune.loop.listener import LoopListener
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import JobVerdict
from autotune.session.session import Session
from autotune.text.console import Console
from autotune.text.jobs import state_word
from autotune.text.rows import TrialRows, TrialTable, baseline_of, rate_text
from autotune.text.sizes import duration_text
from search_spaces.outcome import JobState, Purpose
from search_spaces.quantities import number_text
from search_spaces.trial import Progress
from storage.records import TrialRecord

ROWS = 12
"""Maximum trials in the live table; without a terminal every trial is printed as a line."""
PROGRESS_SECONDS = 0.2
"""Minimum time between redraws for progress only: faster ones are not readable, and terminals flicker."""


class LiveTable(LoopListener):
    """Draws a table if standard error is a terminal; otherwise prints one line per trial."""

    def __init__(self, session: Session, console: Console) -> None:
        self._session, self._console = session, console
        self._lines: TrialRows | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._began = time.monotonic()
        self._ended_before = 0
        self._snapshot: JobSnapshot | None = None
        self._running: dict[int, tuple[TrialRecord, str]] = {}
        self._drawing = False
        self._drawn = 0.0
        self._rows = ROWS
        self._charts = LiveCharts(session, console)
        self._note = ""
        self._verdict: JobVerdict | None = None

    def __enter__(self) -> "LiveTable":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end_live()

    def on_state(self, state: JobState, message: str, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        if state is JobState.RUNNING:
            self._ended_before = ended(snapshot.trials).total
            self._announce(snapshot)
            if self._note:
                self._console.print(self._note, highlight=False, soft_wrap=True, style="dim")
            if self._live is not None:
                self._live.start()
                self._drawing = True
        elif self._live is not None:
            self._end_live()
            self._print_all(snapshot)
        if message and state is not JobState.PAUSED:  # for a pause, how to continue is printed elsewhere
            self._console.print(f"{state_word(state, snapshot.job.reason)}: {message}", highlight=False, soft_wrap=True)

    def on_note(self, note: str) -> None:
        self._note = note

    def on_news(self, news: str) -> None:
        self._console.print(news, highlight=False, soft_wrap=True, style="yellow")

    def on_start(self, trial: TrialRecord) -> None:
        self._running[trial.number] = (trial, "starting")
        self._draw()

    def on_progress(self, trial: TrialRecord, progress: Progress) -> None:
        rate = f" {number_text(progress.samples_per_second)}/s" if progress.samples_per_second else ""
        self._running[trial.number] = (trial, f"{progress.phase}{f' {progress.step}' if progress.step else ''}{rate}")
        if time.monotonic() - self._drawn >= PROGRESS_SECONDS:
            self._draw()

    def on_answer(self, verdict: JobVerdict | None) -> None:
        self._verdict = verdict
        self._draw()

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        self._running.pop(trial.number, None)
        if self._live is None:
            self._lines = self._lines or TrialRows(baseline_of(snapshot.trials))
            self._console.print(self._lines.line(trial), highlight=False, soft_wrap=True)
        self._draw()

    def _announce(self, snapshot: JobSnapshot) -> None:
        session, space, request = self._session, self._session.space, self._session.request
        self._console.print(
            f"job {snapshot.job.id}: {session.model.name} on {session.cluster.name} with {session.world_size} ranks, "
            f"space {space.name} ({space.count():,} configurations), {request.trials} trials by {request.strategy}",
            highlight=False,
            soft_wrap=True,
        )

    def _end_live(self) -> None:
        if self._live is not None and self._drawing:
            self._live.stop()
            self._drawing = False

    def _print_all(self, snapshot: JobSnapshot) -> None:
        """Print all trials, which stay on the screen."""
        rows = TrialTable(baseline_of(snapshot.trials))
        best = self._best()
        for trial in snapshot.trials:
            rows.add(trial, best=best is not None and trial.number == best.number, state="wanted")
        self._console.print(rows.table, *self._charts.lines(snapshot, self._verdict), sep="\n")

    def _draw(self) -> None:
        if self._live is None or not self._drawing or self._snapshot is None:
            return
        best = self._best()
        charts, summary = self._charts.lines(self._snapshot, self._verdict), self._summary(self._snapshot, best)
        available = self._console.height - self._lines_of(summary)
        table = self._table(self._snapshot, best, available - len(charts))
        if charts and self._lines_of(table) > available - len(charts):  # running trials take precedence
            charts, table = [], self._table(self._snapshot, best, available)
        self._live.update(Group(*charts, table, summary), refresh=True)
        self._drawn = time.monotonic()

    def _table(self, snapshot: JobSnapshot, best: TrialRecord | None, available: int) -> Table:
        """The most recently finished trials, as many as fit into the available lines, and the running ones.

        At most one more than in the previous call, since each count requires laying out the table.
        """
        ended = [trial for trial in snapshot.trials if trial.outcome is not None]
        for count in range(min(ROWS, len(ended), self._rows + 1), -1, -1):
            rows = TrialTable(baseline_of(snapshot.trials))
            for trial in ended[len(ended) - count :]:
                rows.add(trial, best=best is not None and trial.number == best.number)
            for trial, state in self._running.values():
                rows.add(trial, state=state)
            self._rows = count
            if self._lines_of(rows.table) <= available:
                break
        return rows.table

    def _lines_of(self, drawn: RenderableType) -> int:
        return len(self._console.render_lines(drawn, pad=False))

    def _summary(self, snapshot: JobSnapshot, best: TrialRecord | None) -> Text:
        request, done, passed = self._session.request, ended(snapshot.trials), time.monotonic() - self._began
        most = most_measurements(request.trials, request.control_every, request.confirm_repeats)
        allowed = None if request.max_seconds is None else request.max_seconds - passed
        remaining_seconds = seconds_left(most, done, passed, since=self._ended_before, allowed=allowed)
        parts = [f"{done.search} of {most.search} trials", f"{duration_text(passed)} passed"]
        if remaining_seconds:
            parts.append(f"at most {duration_text(remaining_seconds)} left")
        if done.confirm or any(trial.purpose is Purpose.CONFIRM for trial in snapshot.trials):
            parts.append("confirming the finalists")
        rate = self._verdict.rate(best) if self._verdict is not None and best is not None else None
        if rate is not None:
            name = "best: the baseline," if self._verdict is not None and self._verdict.keeps else "best"
            parts.append(f"{name} {rate_text(rate)} samples/s")
        return Text(", ".join(parts), style="bold")

    def _best(self) -> TrialRecord | None:
        return self._verdict.best if self._verdict is not None else None
