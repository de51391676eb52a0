"""`autotune.tune`: the sweep as a function, the same as the command."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.best_config import best_config_text, build_best_config
from autotune.errors import JobNotResumableError, NoBestError
from autotune.jobs.baselines import read_baseline
from autotune.jobs.book import Book, read_book
from autotune.jobs.failures_field import read_failures
from autotune.jobs.listener import LoopListener
from autotune.jobs.ray_cluster import with_address
from autotune.jobs.request import request_from_fields, request_to_row
from autotune.jobs.session import Session, prepare, require_startable, session_of
from autotune.jobs.stop import StopSignal
from autotune.loop import run_job
from autotune.output import require_writable, write_whole
from autotune.runners import make_runner
from autotune.strategies.names import STRATEGIES
from autotune.vocabulary import accepts_old_names
from executor.runners.runner import Runner
from search_spaces.outcome import JobState, StopReason
from search_spaces.trial import Interval
from search_spaces.trial_config import TrialConfig, Value
from storage.records import OVER, JobRecord
from storage.sql import default_database_url, open_store
from storage.store import Store


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What a sweep found."""

    job_id: str
    state: JobState
    reason: str
    """A StopReason where the job succeeded."""
    message: str
    best: TrialConfig | None
    """None: nothing may win."""
    best_config: dict[str, Any] | None
    """The document that `out` holds (docs/best-config.md)."""
    gain: Interval | None
    """Best over baseline; None where there is no baseline."""
    traceback: str | None = None
    """Of the error that every trial failed with, as its rank told it; None: there was no such error."""

    @property
    def found_nothing(self) -> bool:
        """Whether the job ended with no configuration that fits."""
        return self.reason == StopReason.NOTHING_FEASIBLE


@accepts_old_names
def tune(
    model: str | None = None,
    *,
    cluster: str | None = None,
    ranks: int | None = None,
    space: str = "zero",
    trials: int = 20,
    strategy: str = STRATEGIES[0],
    objective: str = "throughput",
    seed: int = 0,
    global_batch_size: int = 8,
    sequence_length: int = 128,
    memory_limit: int | str | None = None,
    pins: Mapping[str, Any] | None = None,
    max_seconds: float | None = None,
    trial_timeout: float = 300.0,
    data_path: str | Path | None = None,
    baseline: Mapping[str, Value] | str | Path | None = None,
    out: str | Path | None = None,
    database: str | None = None,
    resume: str | None = None,
    runner: str = "ray",
    ray_address: str | None = None,
    python_path: Sequence[str] = (),
    listener: LoopListener | None = None,
    failures: Mapping[str, Any] | str | Path | None = None,
    **further: Any,
) -> TuneResult:
    """Find the fastest configuration for a model by real trial runs; `autotune sweep` from Python.

    Args:
        model: a preset's name, the path of a Hugging Face config.json, or `module:factory`. Not needed with `resume`.
        cluster: None: `local`, or, where a Ray address is given or in the environment, `ray`.
        memory_limit: bytes per rank, or text with a unit such as "40GB".
        max_seconds, trial_timeout: seconds.
        ray_address: of a Ray cluster; None: AUTOTUNE_RAY_ADDRESS, else RAY_ADDRESS, else a Ray that is started here.
        baseline: knob values, or the path of a file that holds them.
        failures: rows of the failure table by name, or the path of a file that holds them.
        out: where the best configuration is written; None: nowhere.
        database: URL or path; None: AUTOTUNE_DB, else a file in the user's data folder.
        resume: a job's id (or the beginning of one): goes on with its own request, and ignores all fields but `out` and
            `ray_address`.
        further: other fields of `autotune.jobs.request.JobRequest`.

    Raises:
        AutotuneError, SearchSpaceError, StorageError, ExecutorError: one line with the remedy; all that can be found out is
            found out before the first trial.
    """
    if out is not None:
        require_writable(Path(out))
    fields = dict(
        model=model, cluster=cluster, ranks=ranks, space=space, trials=trials, strategy=strategy, objective=objective,
        seed=seed, global_batch_size=global_batch_size, sequence_length=sequence_length, memory_limit=memory_limit,
        pins=dict(pins or {}), max_seconds=max_seconds, trial_timeout=trial_timeout,
        data_path=None if data_path is None else str(data_path), baseline=_baseline_values(baseline), runner=runner,
        ray_address=ray_address, python_path=tuple(python_path), failures=_failure_rows(failures), **further,
    )  # fmt: skip
    if resume is None:
        session = prepare(request_from_fields(with_address({k: v for k, v in fields.items() if v is not None})))
        return run_new_job(session, database or default_database_url(), out=out, listener=listener)
    with open_store(database or default_database_url()) as store:
        job, session = resume_job(store, resume, ray_address)
        with make_runner(session) as made:
            return finish(session, store, job.id, made, out=out, listener=listener)


def run_new_job(
    session: Session,
    database: str,
    *,
    out: str | Path | None = None,
    listener: LoopListener | None = None,
    runner_of: Callable[[Session], Runner] | None = None,
) -> TuneResult:
    """Open a job for what was prepared, and run it to its end. Raises what `tune` raises of ranks and database.

    `runner_of` starts the ranks; None: those that the request names.
    """
    # A job is opened when there are ranks to run it: none is left behind where they cannot be started.
    with open_store(database) as store, (runner_of or make_runner)(session) as made:
        return finish(session, store, open_job(store, session).id, made, out=out, listener=listener)


def open_job(store: Store, session: Session) -> JobRecord:
    """Open a job for what was prepared."""
    return store.create_job(request_to_row(session.request))


def resume_job(store: Store, job_id: str | None, ray_address: str | None = None) -> tuple[JobRecord, Session]:
    """Find a job that can go on; None: the latest. `ray_address`: where its cluster is now; None: where it was.

    Raises:
        UnknownJobError: there is none.
        JobNotResumableError: it has ended, or this version cannot read it.
        RequestError: its data or its devices are not here.
    """
    job = store.job(job_id)
    if job.state in OVER:
        raise JobNotResumableError(job.id, f"has ended ({job.state})", "start a new sweep, or look at it with `autotune show`")
    session = session_of(job)
    if ray_address is not None:
        request = dataclasses.replace(session.request, ray_address=ray_address)
        session = dataclasses.replace(session, request=request)
    require_startable(session)
    return job, session


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
    """Run the job until it ends or is stopped, and write the best that it has then. Raises what `run_job` raises."""
    run_job(session, store, job_id, runner, stop, listener)
    result = result_of(session, read_book(store, job_id))
    if out is not None and result.best_config is not None:
        write_whole(Path(out), best_config_text(result.best_config))
    return result


def result_of(session: Session, book: Book) -> TuneResult:
    """What a job's rows say it found."""
    try:
        document: dict[str, Any] | None = build_best_config(session, book)
    except NoBestError:
        document = None
    return TuneResult(
        job_id=book.job.id,
        state=book.job.state,
        reason=book.job.reason,
        message=book.job.message,
        best=TrialConfig().replace(document["best"]["config"]) if document else None,
        best_config=document,
        gain=_gain(document),
        traceback=_traceback(book) if book.job.state is JobState.FAILED else None,
    )


def _traceback(book: Book) -> str | None:
    """The first that any trial left."""
    results = (book.whole(trial).result for trial in book.searched)
    return next((result.traceback for result in results if result is not None and result.traceback), None)


def _gain(document: dict[str, Any] | None) -> Interval | None:
    gain = ((document or {}).get("baseline") or {}).get("gain")
    return Interval(mean=gain["mean"], low=gain["low"], high=gain["high"]) if gain else None


def _failure_rows(failures: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any] | None:
    return read_failures(Path(failures)) if isinstance(failures, str | Path) else failures


def _baseline_values(baseline: Mapping[str, Value] | str | Path | None) -> dict[str, Value] | None:
    if baseline is None:
        return None
    return read_baseline(Path(baseline)) if isinstance(baseline, str | Path) else dict(baseline)
