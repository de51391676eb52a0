"""Run one job in the foreground: its runner, its live table, and the handling of Ctrl-C."""

import contextlib
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from autotune.cli.live_charts import LiveCharts
from autotune.cli.options import DEFAULT_OUT, SweepOptions
from autotune.errors import JobCutShortError, OutputError
from autotune.loop.budget import ended, most_measurements, seconds_left
from autotune.loop.listener import LoopListener, StopSignal
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.outcome.verdict import JobVerdict
from autotune.session.calibrate import calibrate_for
from autotune.session.session import Session
from autotune.session.trial_requests import make_runner, notes_of
from autotune.text.console import Console
from autotune.text.rows import TextTable, TrialRows, TrialTable, baseline_of, duration_text, rate_text, state_word
from autotune.tuning import TuneResult, finish, open_job
from executor.runners.runner import Runner
from search_spaces.outcome import JobState, Purpose
from search_spaces.quantities import number_text
from search_spaces.trial import Progress
from storage.address import default_database_url, without_password
from storage.errors import DatabaseUnavailableError
from storage.records import JobRecord, TrialRecord
from storage.store import Store, open_store

ROWS = 12
"""Maximum trials in the live table; without a terminal every trial is printed as a line."""


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
                self._console.print(self._note, soft_wrap=True, style="dim")
            if self._live is not None:
                self._live.start()
                self._drawing = True
        elif self._live is not None:
            self._end_live()
            self._print_all(snapshot)
        if message and state is not JobState.PAUSED:  # for a pause, how to continue is printed elsewhere
            self._console.print(f"{state_word(state, snapshot.job.reason)}: {message}", soft_wrap=True)

    def on_note(self, note: str) -> None:
        self._note = note

    def on_news(self, news: str) -> None:
        self._console.print(news, soft_wrap=True, style="yellow")

    def on_start(self, trial: TrialRecord) -> None:
        self._running[trial.number] = (trial, "starting")
        self._draw()

    def on_progress(self, trial: TrialRecord, progress: Progress) -> None:
        rate = f" {number_text(progress.samples_per_second)}/s" if progress.samples_per_second else ""
        self._running[trial.number] = (trial, f"{progress.phase}{f' {progress.step}' if progress.step else ''}{rate}")
        # Faster redraws are not readable, and terminals flicker.
        if time.monotonic() - self._drawn >= 0.2:
            self._draw()

    def on_answer(self, verdict: JobVerdict | None) -> None:
        self._verdict = verdict
        self._draw()

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        self._snapshot = snapshot
        self._running.pop(trial.number, None)
        if self._live is None:
            self._lines = self._lines or TrialRows(baseline_of(snapshot.trials))
            self._console.print(self._lines.line(trial), soft_wrap=True)
        self._draw()

    def _announce(self, snapshot: JobSnapshot) -> None:
        session, space, request = self._session, self._session.space, self._session.request
        self._console.print(
            f"job {snapshot.job.id}: {session.model.name} on {session.cluster.name} with {session.world_size} ranks, "
            f"space {space.name} ({space.count():,} configurations), {request.trials} trials by {request.strategy}",
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

    def _table(self, snapshot: JobSnapshot, best: TrialRecord | None, available: int) -> TextTable:
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


TERMINATES = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before they take the devices."""


def run_new(session: Session, options: SweepOptions, console: Console, out: Path | None = None) -> TuneResult:
    """Open a job for the session, and run it until it ends or is stopped."""
    with open_store(options.database or default_database_url()) as store:
        # After the database was opened, since a command that is refused prints one line.
        for note in () if options.json else notes_of(session):
            print_line(console, f"note: {note}")
        calibrate_for(store, session)
        with start_runner(session, console, options, None) as runner:
            # The job is opened after the ranks are started, so that no job is left behind if they cannot be started.
            return run_job_with_table(session, store, open_job(store, session), runner, options, console, out)


def run_job_with_table(
    session: Session, store: Store, job: JobRecord, runner: Runner, options: SweepOptions, console: Console, out: Path | None
) -> TuneResult:
    """Run the job with its live table until it ends or is stopped."""
    stop = StopSignal()
    # After the runner, since Ray installs its own SIGTERM handler.
    with _stopping(stop, console, resume_line(job.id, options)), _watching(session, console, options.json) as table:
        try:
            return finish(session, store, job.id, runner, out=out, stop=stop, listener=table)
        except OutputError as error:
            remedy = f"the answer is kept: `{shlex.join(['autotune', 'export', job.id, *_database(options)])} --out FILE`"
            raise JobCutShortError("out", error.problem, remedy) from error
        except DatabaseUnavailableError as error:
            remedy = f"what was measured is kept; continue with `{resume_line(job.id, options)}`"
            raise JobCutShortError("job", f"the database failed: {error}", remedy) from error


def start_runner(session: Session, console: Console, options: SweepOptions, job: JobRecord | None) -> Runner:
    """The runner of the session's trials."""
    try:
        with contextlib.nullcontext() if options.json else console.status("starting ranks"):
            return make_runner(session)
    except KeyboardInterrupt:
        if job is not None:
            print_line(console, f"continue with:\n  {resume_line(job.id, options)}")
        raise


@contextlib.contextmanager
def _watching(session: Session, console: Console, quiet: bool) -> Iterator[LoopListener]:
    if quiet:
        yield LoopListener()
        return
    with LiveTable(session, console) as table:
        yield table


@contextlib.contextmanager
def _stopping(stop: StopSignal, console: Console, resume_command: str) -> Iterator[None]:
    """Handle Ctrl-C: the first starts no more trials and prints how to continue, the second kills running trials. A
    termination signal does both."""

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        first = not stop.requested
        stop.request()
        message = f"stopping; running trials end first (Ctrl-C again kills them); continue with:\n  {resume_command}"
        # By a thread: the main one may be in the middle of a write, into which a handler may not write.
        threading.Thread(target=print_line, args=(console, message if first else "killing running trials")).start()

    def terminated(number: int, frame: FrameType | None) -> None:
        interrupted(number, frame)
        stop.request()

    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, *TERMINATES)}
    signal.signal(signal.SIGINT, interrupted)
    for number in TERMINATES:
        signal.signal(number, terminated)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def resume_line(job_id: str, options: SweepOptions) -> str:
    """The command that continues a job, with the same output file and database."""
    out = ["--out", str(options.out)] if options.out != DEFAULT_OUT else []
    return shlex.join(
        ["autotune", "sweep", "--resume", job_id, *out, *_database(options), *(["--json"] if options.json else [])]
    )


def _database(options: SweepOptions) -> list[str]:
    return ["--db", without_password(options.database)] if options.database else []


def print_line(console: Console, line: str) -> None:
    """Print one line without markup and colours."""
    console.print(line, soft_wrap=True)
