"""`autotune sweep`: open or resume a job, run it, write the best configuration, say what was found."""

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from autotune.cli.fields import request_fields, with_import_folders
from autotune.cli.live import LiveTable
from autotune.cli.result import print_result
from autotune.cli.status import Status
from autotune.errors import RequestError
from autotune.jobs.listener import LoopListener
from autotune.jobs.request import JobRequest, request_from_fields
from autotune.jobs.session import Session, prepare
from autotune.jobs.stop import StopSignal
from autotune.output import require_writable
from autotune.runners import make_runner
from autotune.tuning import TuneResult, finish, open_job, resume_job
from executor.runners.runner import Runner
from search_spaces.outcome import JobState
from storage.records import JobRecord
from storage.sql import default_database_url, open_store

DEFAULT_OUT = Path("best-config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What the command line gave."""

    fields: dict[str, Any]
    """Fields of the request that were given as options."""
    pins: tuple[str, ...]
    baseline: Path | None
    out: Path
    config: Path | None
    resume: str | None
    database: str | None
    json: bool


def sweep_command(options: SweepOptions) -> Status:
    """Everything that can be found out is found out before the first trial: model, space, output path, database."""
    console = Console(stderr=True)
    require_writable(options.out)
    session = _prepared(options)
    with open_store(options.database or default_database_url()) as store:
        job, session = (None, session) if session else resume_job(store, _wanted_job(options))
        with _start(session, console, options, job) as runner:
            # A job is opened when there are ranks to run it: none is left behind where they cannot be started.
            job = job or open_job(store, session)
            stop = StopSignal()
            # After the runner, since Ray puts a handler of its own on SIGTERM.
            with _stopping(stop, console, resume_line(job.id, options)), _watching(session, console, options.json) as table:
                result = finish(session, store, job.id, runner, out=options.out, stop=stop, listener=table)
    _print(result, options, console)
    return _status(result)


def _prepared(options: SweepOptions) -> Session | None:
    """What is to be opened as a new job; None: a job is resumed, with its own request."""
    if options.resume is None:
        return prepare(_request(options))
    if options.fields or options.pins or options.baseline or options.config:
        raise RequestError("resume", "a job goes on with its own request", "leave out MODEL and all options but --out and --db")
    return None


def _wanted_job(options: SweepOptions) -> str | None:
    return None if options.resume == "latest" else options.resume


def _start(session: Session, console: Console, options: SweepOptions, job: JobRecord | None) -> Runner:
    try:
        with contextlib.nullcontext() if options.json else console.status("starting ranks"):
            return make_runner(session)
    except KeyboardInterrupt:
        if job is not None:
            _tell(console, f"go on with:\n  {resume_line(job.id, options)}")
        raise


def _request(options: SweepOptions) -> JobRequest:
    fields = request_fields(options.fields, options.pins, options.baseline, options.config)
    return request_from_fields(with_import_folders(fields))


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
        _tell(console, told if first else "killing running trials")

    def terminated(number: int, frame: FrameType | None) -> None:
        interrupted(number, frame)
        stop.request()

    former = {signal.SIGINT: signal.getsignal(signal.SIGINT), signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    signal.signal(signal.SIGINT, interrupted)
    signal.signal(signal.SIGTERM, terminated)
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


def _print(result: TuneResult, options: SweepOptions, console: Console) -> None:
    if options.json:
        document = {
            "job": result.job_id,
            "state": result.state.value,
            "reason": result.reason,
            "message": result.message,
            "best_config": result.best_config,
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    print_result(result.best_config, Console())
    if result.best_config is not None:
        Console().print(f"written to {options.out} (job {result.job_id})", soft_wrap=True, highlight=False)
    if result.state is JobState.PAUSED:
        _tell(console, f"paused; go on with:\n  {resume_line(result.job_id, options)}")


def _tell(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _status(result: TuneResult) -> Status:
    if result.state is JobState.PAUSED:
        return Status.INTERRUPTED
    if result.found_nothing:
        return Status.NOTHING_FEASIBLE
    return Status.OK if result.state is JobState.SUCCEEDED else Status.FAILURE
