"""A worker: takes jobs from the queue, one after another, runs them, and writes logs and traces of each for its operators."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from autotune.errors import AutotuneError
from autotune.loop.heartbeats import LEASE_SECONDS, LeaseHeartbeat, WorkerHeartbeat
from autotune.loop.listener import LoopListener, StopSignal
from autotune.loop.loop import run_held_job
from autotune.outcome.job_snapshot import JobSnapshot
from autotune.request.rows import request_of
from autotune.session.allowed import AllowList, is_from_outside
from autotune.session.calibrate import calibrate_for
from autotune.session.resolve import require_startable, session_of
from autotune.session.session import Session, on_ray
from executor.errors import ExecutorError, RunnerError
from executor.runners.runner import Runner
from search_spaces.errors import SearchSpaceError
from search_spaces.outcome import JobState, Outcome
from storage.errors import DamagedRowError, DatabaseUnavailableError, LeaseLostError
from storage.leases import current_owner
from storage.records import JobRecord, Lease, QueueLimits, TrialRecord
from storage.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A warm runner, and the key of the jobs that can use it."""

    key: tuple[object, ...]
    runner: Runner


class Worker:
    """Runs jobs until it is stopped. If it is stopped or dies, its running job goes back to the queue.

    Ranks stay warm between jobs that need the same ranks.
    """

    def __init__(
        self,
        store: Store,
        make_runner: Callable[[Session], Runner],
        limits: QueueLimits | None = None,
        poll_seconds: float = 0.5,
        ray_address: str | None = None,
        allowed: AllowList | None = None,
    ) -> None:
        """
        Args:
            store: the jobs.
            make_runner: starts the ranks of a job.
            limits: which jobs it takes.
            poll_seconds: how soon a new job in an empty queue is seen.
            ray_address: address of the Ray cluster for jobs without one; None: each starts its own.
            allowed: what jobs from outside may run; None: no factory and no command.
        """
        self._allowed = allowed or AllowList()
        self._store, self._make_runner, self._limits = store, make_runner, limits
        self._ray_address = ray_address
        self._poll_seconds = poll_seconds
        self._kept: _Kept | None = None
        self._heartbeat = WorkerHeartbeat(store, limits)
        self.jobs_done = 0

    def run(self, stop: StopSignal, most_jobs: int | None = None) -> None:
        """Take and run jobs until `stop` is requested, or `most_jobs` were run. Wait during outages of the database."""
        with self._heartbeat, contextlib.closing(self):
            while not stop.requested and (most_jobs is None or self.jobs_done < most_jobs):
                try:
                    lease = self._store.queue.claim(current_owner(), LEASE_SECONDS, self._limits)
                    if lease is None:
                        stop.wait(self._poll_seconds)
                        continue
                    self._run(lease, stop)
                    self.jobs_done += 1
                    self._heartbeat.set_job(None)
                except LeaseLostError as error:
                    log.warning("%s", error)
                    self.close()  # its ranks may still run a trial of a job that another worker has taken
                except DatabaseUnavailableError as error:
                    log.error("%s", error)
                    self.close()
                    # How long a worker waits before it retries an unavailable database.
                    stop.wait(5.0)

    def close(self) -> None:
        """Stop the ranks."""
        warm_ranks, self._kept = self._kept, None
        if warm_ranks is not None:
            self._heartbeat.set_runner("")
            warm_ranks.runner.close()

    def _run(self, lease: Lease, stop: StopSignal) -> None:
        """Run a job to its end. An error of the job or its ranks ends only the job: the worker continues."""
        log.info("job %s: taken", lease.job_id, extra={"job": lease.job_id})
        self._heartbeat.set_job(lease.job_id)
        with LeaseHeartbeat(self._store, lease) as heartbeat:
            try:
                job = self._store.jobs.get(lease.job_id)
                if is_from_outside(job):
                    self._allowed.require(request_of(job))
                session = on_ray(session_of(job), self._ray_address)
                require_startable(session)
                calibrate_for(self._store, session)
            except (AutotuneError, SearchSpaceError, ExecutorError) as error:
                self._fail(heartbeat, error)
                log.error("job %s: %s", lease.job_id, error, extra={"job": lease.job_id})
                return
            try:
                ended = self._run_held(session, heartbeat, StopSignal(worker=stop))
            except (LeaseLostError, DatabaseUnavailableError):
                raise
            except Exception as error:
                # The job was left FAILED with the reason; the state of its ranks is unknown.
                ours = isinstance(error, AutotuneError | SearchSpaceError | ExecutorError | DamagedRowError)
                log.error("job %s: %s", lease.job_id, error, extra={"job": lease.job_id}, exc_info=not ours)
                self.close()
                return
        log.info("job %s: %s %s", ended.id, ended.state, ended.reason, extra={"job": ended.id})

    def _run_held(self, session: Session, heartbeat: LeaseHeartbeat, stop: StopSignal) -> JobRecord:
        """Run the job. Ranks that do not start, or break permanently (for example because Ray itself dies), are not the job's
        fault: they are started up to three times in all.
        """
        # How often a worker starts ranks for a job before it gives up the job.
        for tries_left in reversed(range(3)):
            try:
                runner = self._runner_for(session)
            except Exception as error:
                if not tries_left or not isinstance(error, RunnerError):
                    self._fail(heartbeat, error)
                    raise
                log.warning("job %s: %s; retrying", heartbeat.lease.job_id, error, extra={"job": heartbeat.lease.job_id})
                continue
            try:
                with Journal(heartbeat.lease.job_id) as journal:
                    return run_held_job(session, self._store, heartbeat, runner, stop, journal, keep_on_error=tries_left > 0)
            except RunnerError as error:
                if not tries_left:
                    raise
                log.warning("job %s: %s; retrying", heartbeat.lease.job_id, error, extra={"job": heartbeat.lease.job_id})
                self.close()
        raise AssertionError("unreachable")

    def _fail(self, heartbeat: LeaseHeartbeat, error: Exception) -> None:
        self._store.jobs.release(heartbeat.lease, JobState.FAILED, type(error).__name__, str(error))

    def _runner_for(self, session: Session) -> Runner:
        request = session.request
        # Ranks that only watch a user's script hold no device.
        holds = request.command is None
        runner_address = (request.runner, request.ray_address)
        key = (*runner_address, session.world_size, session.cluster.device.kind, request.python_path, holds)
        if self._kept is None or self._kept.key != key:
            self.close()
            try:
                self._kept = _Kept(key, self._make_runner(session))
            except ExecutorError as error:
                self._heartbeat.set_runner(request.runner, str(error))
                raise
            self._heartbeat.set_runner(request.runner)
        return self._kept.runner


class Journal(LoopListener):
    """Logs and traces one run of a job. As a context manager, it ends the open spans on exit."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._tracer = trace.get_tracer("autotune")
        self._job: Span = self._tracer.start_span("job", attributes={"autotune.job.id": job_id})
        self._trials: dict[int, Span] = {}

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for span in (*self._trials.values(), self._job):
            if error is not None:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            span.end()

    def on_state(self, state: JobState, message: str, snapshot: JobSnapshot) -> None:
        log.info("job %s: %s%s", self._job_id, state, f": {message}" if message else "", extra={"job": self._job_id})
        self._job.set_attributes(
            {"autotune.job.state": state, "autotune.job.model": str(snapshot.job.request.get("model", ""))}
        )

    def on_news(self, news: str) -> None:
        log.warning("job %s: %s", self._job_id, news, extra={"job": self._job_id})

    def on_start(self, trial: TrialRecord) -> None:
        attributes: dict[str, str | int] = {
            "autotune.job.id": self._job_id,
            "autotune.trial.number": trial.number,
            "autotune.trial.purpose": trial.purpose.value,
            "autotune.trial.config": trial.config.hash,
        }
        parent = trace.set_span_in_context(self._job)
        self._trials[trial.number] = self._tracer.start_span("trial", parent, attributes=attributes)

    def on_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:  # noqa: ARG002
        about = {"job": self._job_id, "trial": trial.number}
        log.info("job %s: trial %d: %s", self._job_id, trial.number, trial.outcome, extra=about)
        span = self._trials.pop(trial.number, None)
        if span is not None:
            span.set_attribute("autotune.trial.outcome", str(trial.outcome))
            if trial.outcome in (Outcome.FAILED, Outcome.LOST, Outcome.TIMEOUT, Outcome.WRONG):
                span.set_status(Status(StatusCode.ERROR, str(trial.outcome)))
            span.end()
