"""The tuning loop: recall, propose, check, run, record."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from autotune.errors import DecisionAbandonedError
from autotune.loop.agenda import ending, next_wants
from autotune.loop.checks import refusal
from autotune.loop.confirmation import starts_anew
from autotune.loop.drift_reporter import DriftReporter
from autotune.loop.incumbent import Incumbent
from autotune.loop.lease_heartbeat import LEASE_SECONDS, LeaseHeartbeat
from autotune.loop.listener import LoopListener
from autotune.loop.node_monitor import NodeMonitor
from autotune.loop.output_writer import OutputWriter
from autotune.loop.planned_trial import PlannedTrial
from autotune.loop.results import is_retried, retries_of, with_stated_interval
from autotune.loop.stop import StopSignal
from autotune.loop.verifying import Verifying
from autotune.outcome.drift import drift_of
from autotune.outcome.job_snapshot import JobSnapshot, SnapshotReader, read_book
from autotune.outcome.standings import measured_baseline
from autotune.outcome.verdict import Verdict, Verdicts, answer_summary
from autotune.session.nvme import slowness
from autotune.session.resolve import with_prior
from autotune.session.session import Session, with_changes_of
from autotune.session.trial_requests import trial_request
from executor.errors import RunnerError
from executor.failures import failure_table
from executor.runners.runner import Runner
from search_spaces.checkpoints import checkpoints
from search_spaces.model import ModelSpec
from search_spaces.outcome import JobState, Outcome
from search_spaces.trial import LogLines, NodeEvent, Progress, TrialRequest, TrialResult
from storage.errors import DamagedRowError, JobStateError, StorageError
from storage.owners import current_owner
from storage.records import ASKED, JobRecord, TrialRecord
from storage.store import Store

if TYPE_CHECKING:
    from autotune.loop.step_forecast import StepForecast

POLL_SECONDS = 0.5
"""How soon a wish to stop is seen while trials run."""
LOOK_SECONDS = 1.0
"""How soon a wish that is written in the database is seen while a decision is computed."""
ANSWER_SECONDS = 0.5
"""Least time between two answers so far: of trials that take less, not each has one."""


def run_job(
    session: Session,
    store: Store,
    job_id: str,
    runner: Runner,
    stop: StopSignal | None = None,
    listener: LoopListener | None = None,
) -> JobRecord:
    """Take the job, run it until it ends or is stopped, and give it back. The runner stays open.

    Raises:
        LeaseHeldError: another live process holds the job.
        LeaseLostError: another process took it meanwhile; nothing is written after that.
        RunnerError: ranks cannot be started or placed; the job is left FAILED and can be resumed.
        KeyboardInterrupt: where no handler turned it into a wish to stop; the job is left PAUSED.
    """
    lease = store.acquire(job_id, current_owner(), LEASE_SECONDS)
    with LeaseHeartbeat(store, lease) as keeper:
        return run_held_job(session, store, keeper, runner, stop, listener)


def run_held_job(
    session: Session,
    store: Store,
    keeper: LeaseHeartbeat,
    runner: Runner,
    stop: StopSignal | None = None,
    listener: LoopListener | None = None,
    keeps_broken: bool = False,
) -> JobRecord:
    """Run a job whose lease is held, and give it back. Raises what `run_job` raises.

    With `keeps_broken` the job stays held after a RunnerError, for the caller to go on with another runner.
    """
    try:
        session, note = with_prior(session, store, keeper.lease)
        if note and listener is not None:
            listener.on_note(note)
        loop = TuningLoop(session, store, keeper, runner, stop or StopSignal(), listener or LoopListener())
        released = _run_and_release(loop, store, keeper)
    except BaseException as error:
        # A damaged row is the job's own end: left held, the job would be taken again, and again fail.
        if isinstance(error, StorageError) and not isinstance(error, DamagedRowError):
            raise
        if keeps_broken and isinstance(error, RunnerError):
            raise
        paused = isinstance(error, KeyboardInterrupt)
        state = JobState.PAUSED if paused else JobState.FAILED
        store.release(keeper.lease, state, "interrupted" if paused else type(error).__name__, str(error))
        raise
    (listener or LoopListener()).on_state(released.state, released.message, read_book(store, released.id))
    return released


def _run_and_release(loop: "TuningLoop", store: Store, keeper: LeaseHeartbeat) -> JobRecord:
    """Run until the end that is found is the end of what is asked now: a budget that was extended meanwhile is spent too."""
    while True:
        state, reason, message = loop.run()
        with contextlib.suppress(JobStateError):
            return store.release(keeper.lease, state, reason, message, loop.known_request)


class TuningLoop:
    """One process's run of a job. What must outlive the process is in the store; which attempts run is all it knows itself."""

    def __init__(
        self, session: Session, store: Store, keeper: LeaseHeartbeat, runner: Runner, stop: StopSignal, listener: LoopListener
    ) -> None:
        self._session = session
        self._store = store
        self._keeper = keeper
        self._runner = runner
        self._stop = stop
        self._listener = listener
        self._chronicle = OutputWriter(store, keeper)
        self._reader = SnapshotReader(store, keeper.lease.job_id)
        self._running: dict[str, TrialRecord] = {}
        self._drifts = DriftReporter(store, listener.on_news)
        self._ended: list[int] = []
        self._verdicts = Verdicts()
        self._answered: Verdict | None = None
        self._next_answer = 0.0
        self._spread = session.prior
        self._referenced = False
        self._leader = Incumbent()
        self._forecast = _forecast(session, store, keeper)
        self._table = failure_table(session.request.failures)
        self._verifying = Verifying(store, self._table)
        self._watchman = NodeMonitor(
            store, lambda: keeper.lease, runner, session.world_size, self._table, session.request.failures, listener.on_news
        )
        self._asked: JobState | None = None
        self.known_request: Mapping[str, Any] = {}
        """The job's request as it was read last: what decisions rest on."""

    def run(self) -> tuple[JobState, str, str]:
        """Run until nothing is wanted or a person wishes an end; return the state, reason and message to leave the job in."""
        self._listener.on_state(JobState.RUNNING, "", self.recall())
        if (news := slowness(self._session.request)) is not None:
            self._listener.on_news(news)
        # The first decision loads libraries and orders the space: paid here, not between two trials. It changes nothing.
        with self._abandonable():
            self._session.strategy.propose(self._session.space, (), (), 1, self._session.request.seed)
        while True:
            book = self.recall()
            self._obey(book.job.state)
            self._tell(book)
            self._answer(book)
            wanted = self.propose(book)
            for trial in self.check(wanted):
                self.run_trial(trial, book)
            if self._stop.kill_requested or (self._stop.requested and not self._running):
                self._answer(book, last=True)
                return self._interrupted()
            if not wanted and not self._running:
                self._answer(book, last=True)
                end = ending(self._session, book)
                return end.state, end.reason, end.message
            self.record()

    def recall(self) -> JobSnapshot:
        """Read what is known: the rows are the only truth."""
        book = self._reader.read()
        drift = drift_of(book, measured_baseline(book, self._session.baselines), self._session.prior)
        self._drifts.tell(self._keeper.lease, drift)
        self._spread = book.spread(self._session.prior, drift.cuts())
        self._referenced = bool(book.job.reference_losses)
        self.known_request = book.job.request
        # A budget may be extended, and a label changed, while the job runs.
        self._session = with_changes_of(self._session, book.job)
        return book

    def propose(self, book: JobSnapshot) -> list[PlannedTrial]:
        """Choose what to measure next, as far as there is room to start it."""
        if self._stop.requested:
            return []
        numbers = {trial.number for trial in self._running.values()}
        # A runner that is busy with its own affairs queues one attempt: an idle loop must not take that for the end.
        room = self._runner.capacity() or int(not self._running)
        wanted: list[PlannedTrial] = []  # where it is abandoned
        with self._abandonable():
            wanted += next_wants(self._session, book, numbers, room)
        return wanted

    @contextlib.contextmanager
    def _abandonable(self) -> Iterator[None]:
        """A decision, which may take a minute in a large space: it is abandoned when nothing further is to start."""
        looked = time.monotonic()

        def answer() -> None:
            nonlocal looked
            if time.monotonic() - looked > LOOK_SECONDS:
                with contextlib.suppress(StorageError):
                    self._obey(self._store.job(self._keeper.lease.job_id).state)
                looked = time.monotonic()
            if self._stop.requested:
                raise DecisionAbandonedError

        with contextlib.suppress(DecisionAbandonedError), checkpoints(answer):
            yield

    def check(self, wanted: list[PlannedTrial]) -> list[TrialRecord]:
        """Write down what is wanted, and return what nothing speaks against."""
        trials = [self._written(want) for want in wanted]
        self._ended += [trial.number for trial in trials if trial.outcome is not None]
        return self._verifying.startable([trial for trial in trials if trial.outcome is None], self._running.values())

    def run_trial(self, trial: TrialRecord, book: JobSnapshot) -> None:
        """Hand an attempt at the trial to the runner."""
        attempt = self._store.start_attempt(self._keeper.lease, trial.number)
        self._running[attempt.token] = trial
        self._runner.submit(self._request(attempt.token, trial, book))
        self._listener.on_start(trial)

    def record(self) -> None:
        """Wait until a trial ends, or until more could start, and write down what happened."""
        while self._running and not self._stop.kill_requested:
            self._obey(self._keeper.lease.state)
            if self._record_events() or (self._runner.capacity() and not self._stop.requested):
                return

    def _record_events(self) -> bool:
        """Write down what happened next; return whether a running trial ended."""
        before = len(self._running)
        for handle, event in self._runner.events(POLL_SECONDS):
            trial = self._running.get(handle)
            if isinstance(event, NodeEvent):
                self._watchman.hear(event)
            elif isinstance(event, Progress | LogLines) and trial is not None:
                self._chronicle.hear(event)
                if isinstance(event, Progress):
                    self._listener.on_progress(trial, event)
            elif isinstance(event, TrialResult) and trial is not None:
                self._settle(trial, event)
        self._chronicle.write_due()
        return len(self._running) < before

    def _written(self, want: PlannedTrial) -> TrialRecord:
        refused = refusal(self._session, want)
        return self._store.add_trial(self._keeper.lease, want.config, want.purpose, want.fidelity, want.repeat, refused)

    def _request(self, token: str, trial: TrialRecord, book: JobSnapshot) -> TrialRequest:
        off = self._watchman.kept_off(trial)
        request = trial_request(self._session, token, trial.config, book.job.reference_losses, off)
        fresh = self._verifying.wants(trial) or starts_anew(self._session, book, trial)
        expected = self._forecast.seconds(trial.config, book) if self._forecast is not None else None
        request = dataclasses.replace(request, fresh_processes=fresh, expected_step_seconds=expected)
        return self._leader.asked(request, trial, self._session, book, self._spread)

    def _settle(self, trial: TrialRecord, result: TrialResult) -> None:
        """Store a result: the trial has its outcome now, or is wanted again."""
        del self._running[result.attempt]
        self._chronicle.end(result.attempt)
        lease = self._keeper.lease
        # Of shallower models there are no losses to hold others against.
        if result.outcome is Outcome.OK and result.losses and not self._referenced:
            # Before the trial is closed: a process that is killed in between leaves it wanted, not without a reference.
            self._store.set_reference_losses(lease, result.losses)
        result, elsewhere = self._watchman.judged(trial, result, self._spread.relative)
        retry = elsewhere or self._is_retried(trial, result)
        if self._store.finish_attempt(lease, with_stated_interval(result, self._spread), retry) and not retry:
            self._ended.append(trial.number)

    def _is_retried(self, trial: TrialRecord, result: TrialResult) -> bool:
        if not retries_of(result, self._table):  # which is most: their attempts need not be read
            return False
        return is_retried(result, self._store.attempts(self._keeper.lease.job_id, trial.number), self._table)

    def _tell(self, book: JobSnapshot) -> None:
        """Tell the listener of the trials that ended since the last time."""
        ended, self._ended = self._ended, []
        for number in ended:
            self._listener.on_trial(book.whole(book.trial(number)), book)

    def _answer(self, book: JobSnapshot, last: bool = False) -> None:
        """Keep what the job has found by now, where a measurement changed it."""
        if not last and time.monotonic() < self._next_answer:
            return
        session, self._next_answer = self._session, time.monotonic() + ANSWER_SECONDS
        verdict = self._verdicts.of(book, session.ranking, session.prior, session.baselines)
        if verdict is self._answered:
            return
        self._answered = verdict
        self._store.set_answer(self._keeper.lease, None if verdict is None else answer_summary(verdict))
        self._listener.on_answer(verdict)

    def _obey(self, state: JobState) -> None:
        """Take a state that a person asked for as the wish that it is."""
        self._asked = state if state in ASKED else self._asked
        if self._asked is not None and not self._stop.requested:
            self._stop.request()
        if self._asked is JobState.CANCELLING and not self._stop.kill_requested:
            self._stop.request()

    def _interrupted(self) -> tuple[JobState, str, str]:
        """What still runs is killed and stays wanted: a resume measures it again."""
        for token in self._running:
            self._runner.cancel(token, "interrupted")
            self._chronicle.end(token)
        if self._asked is not None:
            return ASKED[self._asked]
        if self._stop.hands_back:
            return JobState.QUEUED, "", ""
        return JobState.PAUSED, "interrupted", "stopped on request; resume it to go on"


def _forecast(session: Session, store: Store, keeper: LeaseHeartbeat) -> "StepForecast | None":
    """What steps are held against; None: the model has no shape to predict from."""
    if not isinstance(session.model, ModelSpec):
        return None
    # NumPy and the equations: loaded for models that they hold for.
    from autotune.loop.step_forecast import forecast_of

    return forecast_of(session, session.model, store.prior(keeper.lease.job_id))
