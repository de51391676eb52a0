"""`autotune sweep`: open or resume a job, run it, write the best configuration, say what was found."""

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.cli.console import Console
from autotune.cli.fields import request_fields, with_import_folders
from autotune.cli.live import LiveTable
from autotune.cli.passed import pass_environment
from autotune.cli.result import print_result
from autotune.cli.status import Status
from autotune.cluster.ray_cluster import with_address
from autotune.errors import RequestError
from autotune.loop.listener import LoopListener
from autotune.loop.stop import StopSignal
from autotune.ops.output import require_writable
from autotune.request.request import SERIES, JobRequest, request_from_fields
from autotune.session.quick_calibration import calibrate_for
from autotune.session.runners import make_runner
from autotune.session.script_files import notes_of
from autotune.session.session import Session, prepare
from autotune.tuning import TuneResult, finish, open_job, resume_job
from executor.runners.runner import Runner
from search_spaces.outcome import JobState
from storage.records import BUDGET, JobRecord
from storage.sql import default_database_url, open_store
from storage.store import Store

TERMINATES = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they take the devices."""
DEFAULT_OUT = Path("best-config.json")
_RESUMED = "leave out MODEL and all options but --trials, --max-seconds, --out, --db and --ray-address"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What the command line gave."""

    fields: dict[str, Any]
    """Fields of the request that were given as options; `ranks` as text."""
    series: dict[str, Any]
    """What was given of a series of jobs: price, rate, step."""
    pins: tuple[str, ...]
    baseline: Path | None
    imported: Path | None
    """A configuration of another framework: the baseline."""
    history: str | None
    """An Optuna study, or a table, of earlier trials."""
    out: Path
    config: Path | None
    resume: str | None
    database: str | None
    json: bool
    pass_environment: tuple[str, ...] = ()
    """Variables that trials find, beside those of a fixed list."""


def sweep_command(options: SweepOptions) -> Status:
    """Everything that can be found out is found out before the first trial: model, space, output path, database."""
    console = Console(stderr=True)
    require_writable(options.out)
    pass_environment(options.pass_environment)
    if options.resume is not None:
        result = _resumed(options, console)
    else:
        fields = with_address(request_fields(options.fields, options.pins, options.baseline, options.config))
        ranks = ranks_of(fields)
        if options.imported is not None:
            from autotune.cli.imported import with_imported

            fields = with_imported(fields, options.imported, ranks, lambda line: _tell(console, line))
        if fields.get("objective") in SERIES:
            from autotune.cli.series import series_command

            _require_no_history(options)
            return series_command(options, with_import_folders(fields), ranks)
        session = prepare(_request(options, fields, ranks))
        if options.history is not None:
            from autotune.cli.history import with_history

            session = with_history(session, options.history, lambda line: _tell(console, line))
        result = run_new(session, options, console, options.out)
    _print(result, options, console)
    return _status(result)


def run_new(session: Session, options: SweepOptions, console: Console, out: Path | None = None) -> TuneResult:
    """Open a job for what was prepared, and run it until it ends or is stopped."""
    for note in () if options.json else notes_of(session):
        _tell(console, f"note: {note}")
    with open_store(options.database or default_database_url()) as store:
        calibrate_for(store, session)
        with _start(session, console, options, None) as runner:
            # A job is opened when there are ranks to run it: none is left behind where they cannot be started.
            return _run(session, store, open_job(store, session), runner, options, console, out)


def _resumed(options: SweepOptions, console: Console) -> TuneResult:
    fields = {**options.fields}
    ray_address = fields.pop("ray_address", None)
    budget = {name: fields.pop(name) for name in BUDGET if name in fields}
    given = (fields, options.series, options.pins, options.baseline, options.imported, options.history, options.config)
    if any(given):
        raise RequestError("resume", "a job goes on with its own request", _RESUMED)
    with open_store(options.database or default_database_url()) as store:
        job, session = resume_job(store, options.resume, ray_address, budget)
        with _start(session, console, options, job) as runner:
            return _run(session, store, job, runner, options, console, options.out)


def _run(
    session: Session, store: Store, job: JobRecord, runner: Runner, options: SweepOptions, console: Console, out: Path | None
) -> TuneResult:
    stop = StopSignal()
    # After the runner, since Ray puts a handler of its own on SIGTERM.
    with _stopping(stop, console, resume_line(job.id, options)), _watching(session, console, options.json) as table:
        return finish(session, store, job.id, runner, out=out, stop=stop, listener=table)


def _start(session: Session, console: Console, options: SweepOptions, job: JobRecord | None) -> Runner:
    try:
        with contextlib.nullcontext() if options.json else console.status("starting ranks"):
            return make_runner(session)
    except KeyboardInterrupt:
        if job is not None:
            _tell(console, f"go on with:\n  {resume_line(job.id, options)}")
        raise


def _request(options: SweepOptions, fields: dict[str, Any], ranks: tuple[int, ...]) -> JobRequest:
    for name in options.series:
        problem = f"belongs to a series of jobs ({', '.join(SERIES)})"
        raise RequestError(name, problem, "leave it out, or choose such an --objective")
    if len(ranks) > 1:
        raise RequestError("ranks", "has several values for one job", "give one, or choose the objective cost or devices")
    return request_from_fields(with_import_folders(fields | ({"ranks": ranks[0]} if ranks else {})))


def ranks_of(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of ranks that were given: text with commas between, or a file's number or list.

    Raises:
        RequestError: it is none of these.
    """
    given = fields.get("ranks")
    if given is None:
        return ()
    items = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
    try:
        return tuple(item if isinstance(item, int) else int(item.strip()) for item in items)
    except (AttributeError, ValueError) as error:
        raise RequestError("ranks", f"{given!r} is no number of ranks", "write 2, or 1,2,4 for a series") from error


def _require_no_history(options: SweepOptions) -> None:
    if options.history is not None:
        raise RequestError("history", "is of one job, and this is a series of them", "leave it out, or choose one size")


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
    if result.traceback is not None:
        _tell(console, result.traceback.rstrip())
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
