"""`autotune.tune`: the sweep as a Python function."""

import dataclasses
import importlib
import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import JobNotResumableError, MissingPackageError, NoBestError
from autotune.frameworks.best_config import best_config_text
from autotune.loop.listener import LoopListener, StopSignal
from autotune.loop.loop import run_job
from autotune.outcome.best_config import build_best_config
from autotune.outcome.job_snapshot import JobSnapshot, read_snapshot
from autotune.output import require_writable, write_whole
from autotune.ray_cluster import with_address
from autotune.request.rows import read_failures, request_from_fields, request_to_row
from autotune.session.baselines import read_baseline
from autotune.session.calibrate import calibrate_for
from autotune.session.knowledge import with_knowledge
from autotune.session.resolve import prepare, require_startable, session_of
from autotune.session.session import Session, with_changes_of
from autotune.session.trial_requests import make_runner
from autotune.text.console import Console
from autotune.text.progress_bar import ProgressBar, in_notebook
from autotune.text.result import print_result
from autotune.text.rows import state_word
from executor.runners.runner import Runner
from search_spaces.outcome import JobState, StopReason
from search_spaces.trial import Interval
from search_spaces.trial_config import KNOB_NAMES, TrialConfig
from storage.address import default_database_url
from storage.records import OVER, Ask, JobRecord, TrialRecord
from storage.store import Store, open_store

_log = logging.getLogger(__name__)
COLUMNS = (
    "number", "purpose", "repeat", "outcome", "samples_per_second", "samples_per_second_low", "samples_per_second_high",
    "peak_memory_bytes", "seconds", "message",
)  # fmt: skip
"""Columns of `TuneResult.trials_dataframe` before the knobs."""


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of a sweep."""

    job_id: str
    state: JobState
    reason: str
    """A StopReason if the job succeeded."""
    message: str
    best: TrialConfig | None
    """None: no configuration can win."""
    best_config: dict[str, Any] | None = field(repr=False)
    """The document that is written to `out` (docs/best-config.md)."""
    gain: Interval | None
    """Ratio of best to baseline; None if there is no baseline."""
    traceback: str | None = field(default=None, repr=False)
    """Traceback of the error that every trial failed with, as reported by its rank; None: there was no such error."""
    trials: tuple[TrialRecord, ...] = field(default=(), repr=False)
    """Every trial by number, with the figures of its result: rate, peak, message."""

    def trials_dataframe(self) -> Any:
        """Return the trials as a `pandas.DataFrame`: one row per trial, with its figures and every knob as columns.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            remedy = "run pip install pandas, or take the records of `trials`"
            raise MissingPackageError("pandas", "is not installed", remedy) from error
        return pandas.DataFrame([_record(trial) for trial in self.trials], columns=[*COLUMNS, *KNOB_NAMES])

    def __rich_repr__(self) -> Iterator[tuple[str, Any]]:
        for item in dataclasses.fields(self):
            if item.repr:
                yield item.name, getattr(self, item.name)

    def _repr_html_(self) -> str:
        """For notebooks: the final output of `autotune sweep`."""
        console = Console(record=True, file=io.StringIO(), width=120)
        console.print(
            f"job {self.job_id}: {state_word(self.state, self.reason)}: {self.message}", highlight=False, markup=False
        )
        print_result(self.best_config, console)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _record(trial: TrialRecord) -> dict[str, Any]:
    """Return a trial as a flat row."""
    result, started, finished = trial.result, trial.started, trial.finished
    rate = result.samples_per_second if result is not None else None
    return {
        "number": trial.number,
        "purpose": trial.purpose.value,
        "repeat": trial.repeat,
        "outcome": trial.outcome.value if trial.outcome is not None else None,
        "samples_per_second": rate.mean if rate is not None else None,
        "samples_per_second_low": rate.low if rate is not None else None,
        "samples_per_second_high": rate.high if rate is not None else None,
        "peak_memory_bytes": result.peak_memory_bytes if result is not None else None,
        "seconds": (finished - started).total_seconds() if started is not None and finished is not None else None,
        "message": result.message if result is not None else "",
        **trial.config.every_value(),
    }


def tune(
    model: str | None = None,
    *,
    out: str | Path | None = None,
    database: str | None = None,
    resume: str | None = None,
    listener: LoopListener | None = None,
    progress: bool | None = None,
    **fields: Any,
) -> TuneResult:
    """Find the fastest configuration for a model by real trial runs; `autotune sweep` from Python.

    Args:
        model: a preset's name, the path of a Hugging Face config.json, or `module:factory`. Not needed with `resume`.
        out: file for the best configuration; None: it is not written.
        database: URL or path; None: AUTOTUNE_DB, else a file in the user's data folder.
        resume: a job's id, the beginning of one, or `latest`: continues with the job's request, and ignores all fields except
            `ray_address`, and `trials` and `max_seconds`, which become the job's budget. A job that has succeeded needs
            a larger budget than before.
        listener: receives the progress of the job.
        progress: whether a progress bar is shown; None: on a terminal and in notebooks, unless there is a `listener`.
        fields: those of `autotune.request.job_fields.JobFields`, which are the options of `autotune sweep`; None: the default.
            `baseline` and `failures` may be the paths of files.

    Raises:
        AutotuneError, SearchSpaceError, StorageError, ExecutorError: a one-line message with the remedy. Everything that can be
            checked is checked before the first trial.
    """
    if out is not None:
        require_writable(Path(out))
    given = {name: value for name, value in {"model": model, **fields}.items() if value is not None}
    readers: dict[str, Callable[[Path], Any]] = {"baseline": read_baseline, "failures": read_failures, "data_path": str}
    for name, read in readers.items():
        if isinstance(given.get(name), str | Path):
            given[name] = read(Path(given[name]))
    if resume is None:
        session = prepare(with_knowledge(request_from_fields(with_address(given)), _log.info, database))
        return run_new_job(
            session, database or default_database_url(), out=out, listener=_listener(session, listener, progress)
        )
    budget: dict[str, Any] = {name: given[name] for name in ("trials", "max_seconds") if name in given}
    with open_store(database or default_database_url()) as store:
        job, session = resume_job(store, resume, given.get("ray_address"), budget)
        with make_runner(session) as trial_runner:
            return finish(session, store, job.id, trial_runner, out=out, listener=_listener(session, listener, progress))


def _listener(session: Session, listener: LoopListener | None, progress: bool | None) -> LoopListener | None:
    """Return the caller's listener, wrapped in a progress bar if one is shown."""
    if progress is None:  # by default where the output is visible and the caller has no listener
        progress = listener is None and (in_notebook() or sys.stderr.isatty())
    return ProgressBar(session, listener) if progress else listener


def run_new_job(
    session: Session,
    database: str,
    *,
    out: str | Path | None = None,
    listener: LoopListener | None = None,
    runner_of: Callable[[Session], Runner] | None = None,
) -> TuneResult:
    """Create a job for the prepared session, and run it to its end. Raises what `tune` raises for ranks and database.

    `runner_of` starts the ranks; None: the runner that the request names.
    """
    with open_store(database) as store:
        if runner_of is None:
            calibrate_for(store, session)
        # The job is created after its ranks: if they cannot be started, no job is left behind.
        with (runner_of or make_runner)(session) as trial_runner:
            return finish(session, store, open_job(store, session).id, trial_runner, out=out, listener=listener)


def open_job(store: Store, session: Session) -> JobRecord:
    """Create a job for the prepared session."""
    return store.jobs.create(request_to_row(session.request), session.request.devices)


def resume_job(
    store: Store, job_id: str | None, ray_address: str | None = None, budget: Mapping[str, Any] | None = None
) -> tuple[JobRecord, Session]:
    """Find a job that can be resumed, and prepare it for this process.

    Args:
        store: has the job.
        job_id: None or `latest`: the latest.
        ray_address: the current address of its cluster; None: unchanged.
        budget: the new totals of `trials` or `max_seconds`; a job that has succeeded needs larger ones.

    Raises:
        UnknownJobError: the job does not exist.
        JobNotResumableError: it was cancelled or has spent its budget, or this version cannot read it.
        RequestError: its data or its devices are not here.
    """
    job = store.jobs.get(job_id)
    if job.state in OVER and not budget and job.reason != StopReason.STOPPED:
        larger = f"give it more than its {job.request.get('trials')} trials (--trials, or trials= in Python)"
        remedy = larger if job.state is JobState.SUCCEEDED else "start a new sweep, or look at it with `autotune show`"
        raise JobNotResumableError(job.id, f"has ended ({job.state})", remedy)
    session = session_of(job)
    if budget:
        dataclasses.replace(session.request, **budget)  # validates the budget
    if ray_address is not None:
        request = dataclasses.replace(session.request, ray_address=ray_address)
        session = dataclasses.replace(session, request=request)
    require_startable(session)
    if budget or job.state in OVER:
        job = store.queue.ask(job.id, Ask.RESUME, budget, for_worker=False)
    return job, with_changes_of(session, job)


def finish(
    session: Session,
    store: Store,
    job_id: str,
    runner: Runner,
    *,
    out: str | Path | None = None,
    stop: StopSignal | None = None,
    listener: LoopListener | None = None,
) -> TuneResult:
    """Run the job until it ends or is stopped, and write its best configuration. Raises what `run_job` raises."""
    run_job(session, store, job_id, runner, stop, listener)
    result = result_of(session, read_snapshot(store, job_id))
    if out is not None and result.best_config is not None:
        write_whole(Path(out), best_config_text(result.best_config))
    return result


def result_of(session: Session, snapshot: JobSnapshot) -> TuneResult:
    """Return the result of a job from its rows."""
    session = with_changes_of(session, snapshot.job)  # the budget or a label may have changed while it ran
    try:
        document: dict[str, Any] | None = build_best_config(session, snapshot)
    except NoBestError:
        document = None
    results = (snapshot.whole(trial).result for trial in snapshot.searched)
    tracebacks = (result.traceback for result in results if result is not None and result.traceback)
    return TuneResult(
        job_id=snapshot.job.id,
        state=snapshot.job.state,
        reason=snapshot.job.reason,
        message=snapshot.job.message,
        best=TrialConfig().replace(document["best"]["config"]) if document else None,
        best_config=document,
        gain=_gain(document),
        traceback=next(tracebacks, None) if snapshot.job.state is JobState.FAILED else None,
        trials=tuple(snapshot.trials),
    )


def _gain(document: dict[str, Any] | None) -> Interval | None:
    gain = ((document or {}).get("baseline") or {}).get("gain")
    return Interval(mean=gain["mean"], low=gain["low"], high=gain["high"]) if gain else None
