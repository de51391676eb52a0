"""`autotune sweep` opens or resumes a job, runs it and prints the result; `autotune submit` gives a job to the workers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table

from autotune.cli.fields import request_fields, with_import_folders
from autotune.cli.foreground import print_line, resume_line, run_job_with_table, run_new, start_runner
from autotune.cli.launch_start import start_once
from autotune.cli.options import SweepOptions
from autotune.cli.status import Status, write_document
from autotune.cli.worker import pass_environment
from autotune.errors import RequestError
from autotune.frameworks.best_config import best_config_text
from autotune.frameworks.history import read_history
from autotune.output import require_writable, write_whole
from autotune.ray_cluster import with_address
from autotune.request.request import JobRequest
from autotune.request.rows import SERIES, request_from_fields
from autotune.series import SeriesEntry, SeriesRequest, SeriesResult
from autotune.series_run import EquationForecast, run_series
from autotune.session.knowledge import admit, require_learning, with_knowledge
from autotune.session.resolve import prepare
from autotune.session.session import Session
from autotune.text.console import Console
from autotune.text.result import print_result
from autotune.text.rows import first_text, rate_text
from autotune.tuning import TuneResult, resume_job
from executor.engines.capabilities import COMMAND
from search_spaces.outcome import JobState, StopReason
from search_spaces.trial import Interval
from storage.address import default_database_url, without_password
from storage.records import BUDGET
from storage.store import open_store


def sweep_command(options: SweepOptions) -> Status:
    """Run a sweep. Model, space, output path and database are validated before the first trial."""
    console = Console(stderr=True)
    require_writable(options.out)
    pass_environment(options.pass_environment)
    if options.resume is not None:
        result = _resumed(options, console)
    else:
        fields = with_address(request_fields(options.fields, options.config))
        ranks = ranks_of(fields)
        if options.inside:
            from autotune.cli.inside import inside_command

            return inside_command(options, fields, ranks)
        if options.share is not None:
            raise RequestError("share", "belongs to a run that tunes itself", "add --inside, or leave --share out")
        if options.imported is not None:
            from autotune.cli.imported import with_imported

            fields = with_imported(fields, options.imported, options.stated, ranks, lambda line: print_line(console, line))
        if fields.get("objective") in SERIES:
            if fields.get("knowledge") is not None:
                problem = "applies to one job, but this is a series of jobs"
                raise RequestError("knowledge", problem, "leave it out, or choose one size")
            return series_command(options, with_import_folders(fields), ranks)
        history = _history_in(fields)
        request = with_knowledge(_request(options, fields, ranks), lambda line: print_line(console, line), options.database)
        session = prepare(request)
        if history is not None:
            session = with_history(session, history, lambda line: print_line(console, line))
        result = run_new(session, options, console, options.out)
    _print(result, options, console)
    return _status(result)


def _resumed(options: SweepOptions, console: Console) -> TuneResult:
    fields = {**options.fields}
    ray_address = fields.pop("ray_address", None)
    budget = {name: fields.pop(name) for name in BUDGET if name in fields}
    overrides = (fields, options.series, options.imported, options.config)
    if any(overrides):
        remedy = "leave out MODEL and all options except --trials, --max-seconds, --out, --db and --ray-address"
        raise RequestError("resume", "a job is resumed with its own request", remedy)
    with open_store(options.database or default_database_url()) as store:
        job, session = resume_job(store, options.resume, ray_address, budget)
        with start_runner(session, console, options, job) as runner:
            return run_job_with_table(session, store, job, runner, options, console, options.out)


def _request(options: SweepOptions, fields: dict[str, Any], ranks: tuple[int, ...]) -> JobRequest:
    for name in options.series:
        problem = f"applies to a series of jobs ({', '.join(SERIES)})"
        raise RequestError(name, problem, "leave it out, or choose such an --objective")
    if len(ranks) > 1:
        raise RequestError("ranks", "has several values for one job", "give one, or choose the objective cost or devices")
    return request_from_fields(with_import_folders(fields | ({"ranks": ranks[0]} if ranks else {})))


def ranks_of(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Parse numbers of ranks: comma-separated text, or a number or list from a file.

    Raises:
        RequestError: it is none of these.
    """
    ranks = fields.get("ranks")
    if ranks is None:
        return ()
    items = ranks.split(",") if isinstance(ranks, str) else ranks if isinstance(ranks, list) else [ranks]
    try:
        return tuple(item if isinstance(item, int) else int(item.strip()) for item in items)
    except (AttributeError, ValueError) as error:
        raise RequestError("ranks", f"{ranks!r} is not a number of ranks", "write 2, or 1,2,4 for a series") from error


def _history_in(fields: dict[str, Any]) -> str | None:
    """Take trials of the job's own model, batch and hardware from the fields: they are read when its space is known."""
    knowledge = fields.get("knowledge")
    if not isinstance(knowledge, str):
        return None
    from autotune.knowledge.read import is_history

    return fields.pop("knowledge") if is_history(knowledge) else None


def _print(result: TuneResult, options: SweepOptions, console: Console) -> None:
    if options.json:
        document = {
            "job": result.job_id,
            "state": result.state.value,
            "reason": result.reason,
            "message": result.message,
            "best_config": result.best_config,
        }
        write_document(document)
        return
    if result.traceback is not None:
        print_line(console, result.traceback.rstrip())
    print_result(result.best_config, Console())
    if result.best_config is not None:
        if result.state is JobState.SUCCEEDED and result.best_config["engine"] == COMMAND:
            with console.status("starting the launch line once"):
                line = start_once(result.best_config)
            Console().print(f"  {line}", soft_wrap=True, highlight=False, markup=False)
        Console().print(f"written to {options.out} (job {result.job_id})", soft_wrap=True, highlight=False)
    if result.state is JobState.PAUSED:
        print_line(console, f"paused; continue with:\n  {resume_line(result.job_id, options)}")


def _status(result: TuneResult) -> Status:
    if result.state is JobState.PAUSED:
        return Status.INTERRUPTED
    if result.reason == StopReason.NOTHING_FEASIBLE:
        return Status.NOTHING_FEASIBLE
    return Status.OK if result.state is JobState.SUCCEEDED else Status.FAILURE


def series_command(options: SweepOptions, fields: Mapping[str, Any], ranks: tuple[int, ...]) -> Status:
    """Run the series. Only the best configuration of the answer's size is written."""
    console = Console(stderr=True)
    shared = {name: value for name, value in fields.items() if name not in ("objective", "ranks")}
    series = SeriesRequest(objective=fields["objective"], fields=shared, ranks=ranks, **options.series)

    def sweep(session: Session) -> TuneResult:
        if not options.json:
            size = f"{session.world_size} ranks, samples of {session.request.sequence_length} tokens"
            console.print(size, style="bold", highlight=False, soft_wrap=True)
        return run_new(session, options, console)

    result = run_series(series, sweep, EquationForecast(database=options.database or default_database_url()))
    if result.best_config is not None:
        write_whole(options.out, best_config_text(result.best_config))
    _print_series(result, options)
    if result.interrupted:
        return Status.INTERRUPTED
    return Status.OK if result.answer is not None else Status.NOTHING_FEASIBLE


def _print_series(result: SeriesResult, options: SweepOptions) -> None:
    if options.json:
        write_document(result.document())
        return
    console = Console()
    print_result(result.best_config, console)
    console.print(_table(result.entries), highlight=False)
    console.print(f"{result.objective}: {result.message}", highlight=False, markup=False, soft_wrap=True)
    if result.best_config is not None:
        console.print(f"written to {options.out}", highlight=False, markup=False, soft_wrap=True)


def _table(entries: tuple[SeriesEntry, ...]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for name in ("ranks", "tokens", "samples/s [95 %]"):
        table.add_column(name, justify="right")
    priced = any(entry.cost is not None for entry in entries)
    if priced:
        table.add_column("per million tokens", justify="right")
    scaled = any(entry.efficiency is not None for entry in entries)
    if scaled:
        table.add_column("efficiency", justify="right")
    table.add_column("")
    for entry in entries:
        costs = (*((rate_text(entry.cost),) if priced else ()), *((_share(entry.efficiency),) if scaled else ()))
        job = f"job {entry.job_id}: " if entry.job_id is not None else ""
        table.add_row(
            str(entry.ranks), str(entry.sequence_length), rate_text(entry.samples_per_second), *costs, f"{job}{entry.message}"
        )
    return table


def _share(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.mean:.0%} [{interval.low:.0%}, {interval.high:.0%}]"


def with_history(session: Session, source: str, report: Callable[[str], None]) -> Session:
    """The session with the trials that are usable; the number of others is reported by reason.

    Raises:
        RequestError: the history cannot be read, no trial is usable, or the job cannot learn from it.
    """
    require_learning(session.request, session.model)
    rows = read_history(source)
    admitted = admit(rows, session)
    report(f"knowledge: {len(admitted.trials)} of {len(rows)} trials count")
    for reason, numbers in admitted.refused.items():
        report(f"knowledge: {'trials' if len(numbers) > 1 else 'trial'} {first_text(numbers, 12)} left out: {reason}")
    if not admitted.trials:
        problem = f"no trial of {without_password(source)} counts"
        raise RequestError("knowledge", problem, "use the names of knobs for its columns or parameters")
    return dataclasses.replace(session, request=dataclasses.replace(session.request, resolved_history=admitted.trials))
