"""The tuning loop: recall, propose, check, run, record."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.errors import DecisionAbandonedError
from autotune.loop.agenda import DriftReporter, Incumbent, ending, next_trials
from autotune.loop.confirmation import needs_fresh_processes
from autotune.loop.heartbeats import LEASE_SECONDS, LeaseHeartbeat, OutputWriter
from autotune.loop.listener import LoopListener, StopSignal, TrackedListener
from autotune.loop.node_monitor import NodeMonitor
from autotune.loop.trials import PlannedTrial, Verifying, forecast_of, refusal, with_stated_interval
from autotune.outcome.job_snapshot import JobSnapshot, SnapshotReader, read_snapshot
from autotune.outcome.standings import drift_of, measured_baseline
from autotune.outcome.verdict import JobVerdict, Verdicts, answer_summary
from autotune.session.feasible import speed_warning
from autotune.session.resolve import with_prior
from autotune.session.session import Session, with_changes_of
from autotune.session.trial_requests import trial_request
from executor.errors import RunnerError, failure_table
from executor.runners.runner import Runner
from search_spaces.lattice import checkpoints
from search_spaces.models.command import CommandModel
from search_spaces.outcome import RETRIES, JobState, Outcome
from search_spaces.trial import LogLines, NodeEvent, Progress, TrialRequest, TrialResult, reference_name
from storage.errors import DamagedRowError, JobStateError, StorageError
from storage.leases import current_owner
from storage.records import ASKED, JobRecord, TrialRecord
from storage.store import Store

POLL_SECONDS = 0.5
"""How soon a stop request is seen while trials run."""
LOOK_SECONDS = 1.0
"""How soon a stop request in the database is seen while a decision is computed."""
ANSWER_SECONDS = 0.5
"""Least time between two intermediate answers: short trials do not each get one."""


def run_job(
    session: Session,
    store: Store,
    job_id: str,
    runner: Runner,
    stop: StopSignal | None = None,
    listener: LoopListener | None = None,
) -> JobRecord:
    """Acquire the job, run it until it ends or is stopped, and release it. The runner stays open.

    Raises:
        LeaseHeldError: another live process holds the job.
        LeaseLostError: another process took it meanwhile; nothing is written after that.
        RunnerError: ranks cannot be started or placed; the job is left FAILED and can be resumed.
        KeyboardInterrupt: no handler turned it into a stop request; the job is left PAUSED.
    """
    lease = store.jobs.acquire(job_id, current_owner(), LEASE_SECONDS)
    with LeaseHeartbeat(store, lease) as heartbeat:
        return run_held_job(session, store, heartbeat, runner, stop, listener)


def run_held_job(
    session: Session,
    store: Store,
    heartbeat: LeaseHeartbeat,
    runner: Runner,
    stop: StopSignal | None = None,
    listener: LoopListener | None = None,
    keep_on_error: bool = False,
) -> JobRecord:
    """Run a job whose lease is held, and release it. Raises what `run_job` raises.

    With `keep_on_error`, the job stays held after a RunnerError, so that the caller can continue with another runner.
    """
    with TrackedListener(listener or LoopListener(), session) as tracked:
        try:
            session, note = with_prior(session, store, heartbeat.lease)
            if note:
                tracked.on_note(note)
            loop = TuningLoop(session, store, heartbeat, runner, stop or StopSignal(), tracked)
            released = None
            while released is None:  # it runs again if the budget was extended meanwhile
                state, reason, message = loop.run()
                with contextlib.suppress(JobStateError):
                    released = store.jobs.release(heartbeat.lease, state, reason, message, loop.known_request)
        except BaseException as error:
            # A damaged row ends the job: if its lease were kept, the job would be taken and fail again and again.
            if isinstance(error, StorageError) and not isinstance(error, DamagedRowError):
                raise
            if keep_on_error and isinstance(error, RunnerError):
                raise
            paused = isinstance(error, KeyboardInterrupt)
            ended = JobState.PAUSED if paused else JobState.FAILED
            store.jobs.release(heartbeat.lease, ended, "interrupted" if paused else type(error).__name__, str(error))
            raise
        tracked.on_state(released.state, released.message, read_snapshot(store, released.id))
    return released


class TuningLoop:
    """One process's run of a job. All durable state is in the store; the loop itself only knows its running attempts."""

    def __init__(
        self,
        session: Session,
        store: Store,
        heartbeat: LeaseHeartbeat,
        runner: Runner,
        stop: StopSignal,
        listener: LoopListener,
    ) -> None:
        self._session = session
        self._store = store
        self._heartbeat = heartbeat
        self._runner = runner
        self._stop = stop
        self._listener = listener
        self._output_writer = OutputWriter(store, heartbeat)
        self._reader = SnapshotReader(store, heartbeat.lease.job_id)
        self._running: dict[str, TrialRecord] = {}
        self._drift_reporter = DriftReporter(store, listener.on_news)
        self._ended: list[int] = []
        self._verdicts = Verdicts()
        self._answered: JobVerdict | None = None
        self._next_answer = 0.0
        self._spread = session.prior
        self._references: frozenset[str] = frozenset()
        self._incumbent = Incumbent()
        # To tell a hang from a slow step. The rate of a script is its own report.
        is_script = isinstance(session.model, CommandModel)
        self._forecast = None if is_script else forecast_of(session, store.jobs.prior(heartbeat.lease.job_id))
        self._table = failure_table(session.request.failures)
        self._verifying = Verifying(store, self._table)
        self._node_monitor = NodeMonitor(
            store, lambda: heartbeat.lease, runner, session.world_size, self._table, session.request.failures, listener.on_news
        )
        self._asked: JobState | None = None
        self.known_request: Mapping[str, Any] = {}
        """The job's request as last read; decisions use this version."""

    def run(self) -> tuple[JobState, str, str]:
        """Run until there is nothing to measure or a user stops the job; return the job's final state, reason and message."""
        self._listener.on_state(JobState.RUNNING, "", self.recall())
        if (news := speed_warning(self._session.request)) is not None:
            self._listener.on_news(news)
        # The first decision loads libraries and orders the space. Do this before the first trial; the result is discarded.
        with self._abandonable():
            self._session.strategy.propose(self._session.space, (), (), 1, self._session.request.seed)
        while True:
            snapshot = self.recall()
            self._obey(snapshot.job.state)
            ended, self._ended = self._ended, []
            for number in ended:
                self._listener.on_trial(snapshot.whole(snapshot.trial(number)), snapshot)
            self._answer(snapshot)
            planned = self.propose(snapshot)
            for trial in self.check(planned):
                self.run_trial(trial, snapshot)
            if self._stop.kill_requested or (self._stop.requested and not self._running):
                self._answer(snapshot, last=True)
                return self._interrupted()
            if not planned and not self._running:
                self._answer(snapshot, last=True)
                end = ending(self._session, snapshot)
                return end.state, end.reason, end.message
            self.record()

    def recall(self) -> JobSnapshot:
        """Read the job's rows, which are the only source of truth."""
        snapshot = self._reader.read()
        drift = drift_of(snapshot, measured_baseline(snapshot, self._session.baselines), self._session.prior)
        self._drift_reporter.report(self._heartbeat.lease, drift)
        self._spread = snapshot.spread(self._session.prior, drift.cuts())
        self._references = frozenset(snapshot.job.reference_losses)
        self.known_request = snapshot.job.request
        # A user may extend the budget or change a label while the job runs.
        self._session = with_changes_of(self._session, snapshot.job)
        return snapshot

    def propose(self, snapshot: JobSnapshot) -> list[PlannedTrial]:
        """Choose the next trials, as many as can start now."""
        if self._stop.requested:
            return []
        numbers = {trial.number for trial in self._running.values()}
        # A runner without free capacity queues one attempt: an idle loop must not mistake a busy runner for the end of the job.
        slots = self._runner.capacity() or int(not self._running)
        planned: list[PlannedTrial] = []  # the result if the decision is abandoned
        with self._abandonable():
            planned += next_trials(self._session, snapshot, numbers, slots)
        return planned

    @contextlib.contextmanager
    def _abandonable(self) -> Iterator[None]:
        """Abandon the enclosed decision when the job is stopped: a decision in a large space may take a minute."""
        last_check = time.monotonic()

        def check_stop() -> None:
            nonlocal last_check
            if time.monotonic() - last_check > LOOK_SECONDS:
                with contextlib.suppress(StorageError):
                    self._obey(self._store.jobs.get(self._heartbeat.lease.job_id).state)
                last_check = time.monotonic()
            if self._stop.requested:
                raise DecisionAbandonedError

        with contextlib.suppress(DecisionAbandonedError), checkpoints(check_stop):
            yield

    def check(self, planned: list[PlannedTrial]) -> list[TrialRecord]:
        """Record the planned trials, and return those that are not refused and can start."""
        trials = []
        for plan in planned:
            refused, lease = refusal(self._session, plan), self._heartbeat.lease
            trials.append(self._store.trials.add(lease, plan.config, plan.purpose, plan.fidelity, plan.repeat, refused))
        self._ended += [trial.number for trial in trials if trial.outcome is not None]
        return self._verifying.startable([trial for trial in trials if trial.outcome is None], self._running.values())

    def run_trial(self, trial: TrialRecord, snapshot: JobSnapshot) -> None:
        """Submit an attempt at the trial to the runner."""
        attempt = self._store.attempts.start(self._heartbeat.lease, trial.number)
        self._running[attempt.token] = trial
        self._runner.submit(self._request(attempt.token, trial, snapshot))
        self._listener.on_start(trial)

    def record(self) -> None:
        """Record events until a trial ends or another trial could start."""
        while self._running and not self._stop.kill_requested:
            self._obey(self._heartbeat.lease.state)
            if self._record_events() or (self._runner.capacity() and not self._stop.requested):
                return

    def _record_events(self) -> bool:
        """Record the runner's next events; return whether a running trial ended."""
        before = len(self._running)
        for handle, event in self._runner.events(POLL_SECONDS):
            trial = self._running.get(handle)
            if isinstance(event, NodeEvent):
                self._node_monitor.on_event(event)
            elif isinstance(event, Progress | LogLines) and trial is not None:
                self._output_writer.add(event)
                if isinstance(event, Progress):
                    self._listener.on_progress(trial, event)
            elif isinstance(event, TrialResult) and trial is not None:
                self._settle(trial, event)
        self._output_writer.write_due()
        return len(self._running) < before

    def _request(self, token: str, trial: TrialRecord, snapshot: JobSnapshot) -> TrialRequest:
        excluded = self._node_monitor.excluded_nodes(trial)
        losses = snapshot.job.reference_losses.get(reference_name(self._session.model, trial.config), ())
        request = trial_request(self._session, token, trial.config, losses, excluded)
        fresh = self._verifying.is_verification(trial) or needs_fresh_processes(self._session, snapshot, trial)
        expected = self._forecast.seconds(trial.config, snapshot) if self._forecast is not None else None
        request = dataclasses.replace(request, fresh_processes=fresh, expected_step_seconds=expected)
        return self._incumbent.with_fidelity_and_race(request, trial, self._session, snapshot, self._spread)

    def _settle(self, trial: TrialRecord, result: TrialResult) -> None:
        """Store a result: the trial either has its outcome now, or is retried."""
        del self._running[result.attempt]
        self._output_writer.end(result.attempt)
        lease = self._heartbeat.lease
        # Results of models with fewer layers have no losses, so they cannot be the reference.
        name = reference_name(self._session.model, trial.config)
        if result.outcome is Outcome.OK and result.losses and name not in self._references:
            # Before the trial is closed: if the process is killed in between, the trial is retried, and no reference is lost.
            self._store.jobs.set_reference_losses(lease, result.losses, name)
        result, elsewhere = self._node_monitor.judge(trial, result, self._spread.relative)
        retry = elsewhere or self._is_retried(trial, result)
        if self._store.attempts.finish(lease, with_stated_interval(result, self._spread), retry) and not retry:
            self._ended.append(trial.number)

    def _is_retried(self, trial: TrialRecord, result: TrialResult) -> bool:
        row = self._table.row(result.cause)
        retries = RETRIES.get(result.outcome, 0) if row is None else row.retries
        if not retries:  # the common case: the attempts need not be read
            return False
        # Each outcome has its own number of retries. Attempts that a killed process left unfinished do not count.
        attempts = self._store.attempts.of(self._heartbeat.lease.job_id, trial.number)
        return sum(attempt.outcome is result.outcome for attempt in attempts) < retries

    def _answer(self, snapshot: JobSnapshot, last: bool = False) -> None:
        """Store the job's verdict so far if a measurement changed it."""
        if not last and time.monotonic() < self._next_answer:
            return
        session, self._next_answer = self._session, time.monotonic() + ANSWER_SECONDS
        verdict = self._verdicts.of(snapshot, session.ranking, session.prior, session.baselines)
        if verdict is self._answered:
            return
        self._answered = verdict
        self._store.jobs.set_answer(self._heartbeat.lease, None if verdict is None else answer_summary(verdict))
        self._listener.on_answer(verdict)

    def _obey(self, state: JobState) -> None:
        """Turn a state that a user requested into a stop request."""
        self._asked = state if state in ASKED else self._asked
        if self._asked is not None and not self._stop.requested:
            self._stop.request()
        if self._asked is JobState.CANCELLING and not self._stop.kill_requested:
            self._stop.request()

    def _interrupted(self) -> tuple[JobState, str, str]:
        """Kill the running trials; they stay planned, so a resume measures them again."""
        for token in self._running:
            self._runner.cancel(token, "interrupted")
            self._output_writer.end(token)
        if self._asked is not None:
            return ASKED[self._asked]
        if self._stop.hands_back:
            return JobState.QUEUED, "", ""
        return JobState.PAUSED, "interrupted", "stopped on request; resume it to go on"
