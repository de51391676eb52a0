"""One job run in the foreground: its runner, its live table, what Ctrl-C does."""

import contextlib
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from autotune.cli.foreground_options import DEFAULT_OUT, SweepOptions
from autotune.cli.live import LiveTable
from autotune.loop.listener import LoopListener
from autotune.loop.stop import StopSignal
from autotune.session.quick_calibration import calibrate_for
from autotune.session.runners import make_runner
from autotune.session.script_files import notes_of
from autotune.session.session import Session
from autotune.text.console import Console
from autotune.tuning import TuneResult, finish, open_job
from executor.runners.runner import Runner
from storage.records import JobRecord
from storage.sql import default_database_url, open_store
from storage.store import Store

TERMINATES = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they take the devices."""


def run_new(session: Session, options: SweepOptions, console: Console, out: Path | None = None) -> TuneResult:
    """Open a job for what was prepared, and run it until it ends or is stopped."""
    for note in () if options.json else notes_of(session):
        print_line(console, f"note: {note}")
    with open_store(options.database or default_database_url()) as store:
        calibrate_for(store, session)
        with start_runner(session, console, options, None) as runner:
            # A job is opened when there are ranks to run it: none is left behind where they cannot be started.
            return run_job_shown(session, store, open_job(store, session), runner, options, console, out)


def run_job_shown(
    session: Session, store: Store, job: JobRecord, runner: Runner, options: SweepOptions, console: Console, out: Path | None
) -> TuneResult:
    """Run the job with its live table until it ends or is stopped."""
    stop = StopSignal()
    # After the runner, since Ray puts a handler of its own on SIGTERM.
    with _stopping(stop, console, resume_line(job.id, options)), _watching(session, console, options.json) as table:
        return finish(session, store, job.id, runner, out=out, stop=stop, listener=table)


def start_runner(session: Session, console: Console, options: SweepOptions, job: JobRecord | None) -> Runner:
    """The runner of the session's trials."""
    try:
        with contextlib.nullcontext() if options.json else console.status("starting ranks"):
            return make_runner(session)
    except KeyboardInterrupt:
        if job is not None:
            print_line(console, f"go on with:\n  {resume_line(job.id, options)}")
        raise


@contextlib.contextmanager
def _watching(session: Session, console: Console, quiet: bool) -> Iterator[LoopListener]:
    if quiet:
        yield LoopListener()
        return
    with LiveTable(session, console) as table:
        yield table


@contextlib.contextmanager
def _stopping(stop: StopSignal, console: Console, go_on: str) -> Iterator[None]:
    """Ctrl-C: the first stops asking and says how to go on, the second kills what runs. A request to terminate does both."""

    def interrupted(_number: int, _frame: FrameType | None) -> None:
        first = not stop.requested
        stop.request()
        told = f"stopping; running trials end first (Ctrl-C again kills them); go on with:\n  {go_on}"
        print_line(console, told if first else "killing running trials")

    def terminated(number: int, frame: FrameType | None) -> None:
        interrupted(number, frame)
        stop.request()

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, *TERMINATES)}
    signal.signal(signal.SIGINT, interrupted)
    for number in TERMINATES:
        signal.signal(number, terminated)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def resume_line(job_id: str, options: SweepOptions) -> str:
    """The command that goes on with a job, to the same file and in the same database."""
    out = ["--out", str(options.out)] if options.out != DEFAULT_OUT else []
    database = ["--db", options.database] if options.database else []
    return shlex.join(["autotune", "sweep", "--resume", job_id, *out, *database, *(["--json"] if options.json else [])])


def print_line(console: Console, line: str) -> None:
    """One line as it is: no markup, no colours."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)
