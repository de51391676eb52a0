"""Run one job in the foreground: its runner, its live table, and the handling of Ctrl-C."""

import contextlib
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from autotune.cli.live import LiveTable
from autotune.cli.options import DEFAULT_OUT, SweepOptions
from autotune.errors import JobCutShortError, OutputError
from autotune.loop.listener import LoopListener
from autotune.loop.stop import StopSignal
from autotune.session.calibrate import calibrate_for
from autotune.session.runners import make_runner
from autotune.session.session import Session
from autotune.session.trial_requests import notes_of
from autotune.text.console import Console
from autotune.tuning import TuneResult, finish, open_job
from executor.runners.runner import Runner
from storage.address import default_database_url, without_password
from storage.errors import DatabaseUnavailableError
from storage.records import JobRecord
from storage.store import Store, open_store

TERMINATES = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before they take the devices."""


def run_new(session: Session, options: SweepOptions, console: Console, out: Path | None = None) -> TuneResult:
    """Open a job for the session, and run it until it ends or is stopped."""
    for note in () if options.json else notes_of(session):
        print_line(console, f"note: {note}")
    with open_store(options.database or default_database_url()) as store:
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
        print_line(console, message if first else "killing running trials")

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
    console.print(line, highlight=False, markup=False, soft_wrap=True)
