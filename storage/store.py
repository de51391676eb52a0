"""The contract of a store."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, TextIO

from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MicrobenchmarkResult
from search_spaces.outcome import JobState, Purpose
from search_spaces.trial import LogLines, Progress, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.errors import QuotaExceededError, SubmissionConflictError
from storage.log_records import LogNews, LogRecord, ProgressRecord
from storage.records import (
    ApiKey,
    Ask,
    AttemptRecord,
    CalibrationRecord,
    EventRecord,
    Figures,
    JobNews,
    JobRecord,
    Lease,
    Overview,
    Owner,
    Placement,
    QuarantineRecord,
    QueueLimits,
    Submission,
    TrialRecord,
)
from storage.service_records import (
    Actor,
    AuditRecord,
    Damage,
    Delivery,
    DeliveryState,
    DeliveryTry,
    Pruned,
    Quota,
    Quotas,
    QuotaUse,
    Usage,
    Webhook,
    WorkerRecord,
)


class Store(ABC):
    """Jobs, trials, attempts and events, kept so that any process can be killed at any point.

    - Each method is one transaction: all of it happens or nothing. Its event rows are written in the same transaction.
    - Methods that take a `Lease` raise LeaseLostError, and write nothing, where the lease is no longer the job's current one.
      A lease that has expired is current until another process takes the job: expiry only permits the takeover.
    - A store may be used from several threads and, on one database, from several processes.
    - Times are UTC.

    Raises:
        DatabaseUnavailableError: the database cannot be reached or written.
    """

    @abstractmethod
    def by(self, actor: Actor) -> "Store":
        """The same store for somebody else: the audit log names them, and their quotas hold. It needs no closing.

        A store that was opened acts for the user of this process, whom no quota stops.
        """

    # jobs

    @abstractmethod
    def create_job(self, request: Mapping[str, Any]) -> JobRecord:
        """Open a job in state QUEUED."""

    @abstractmethod
    def job(self, job_id: str | None = None) -> JobRecord:
        """Return a job by its id, or by a prefix of it that only one job has; None or LATEST: the one created last.

        Raises:
            UnknownJobError: there is none, or the prefix fits several.
        """

    @abstractmethod
    def exact_jobs(self, job_ids: Collection[str]) -> dict[str, JobRecord]:
        """The jobs of exactly these ids, as far as they are there."""

    @abstractmethod
    def jobs(
        self,
        limit: int = 50,
        before: str | None = None,
        states: Collection[JobState] = (),
        submitter: str | None = None,
        tags: Collection[str] = (),
    ) -> list[JobRecord]:
        """The newest jobs first; `before` is the id of the last job of the previous page.

        With `states`, `submitter` or `tags` only those that are in one of these states, were submitted by this one, or have
        all of these tags.
        """

    @abstractmethod
    def job_summaries(
        self,
        limit: int = 50,
        before: str | None = None,
        states: Collection[JobState] = (),
        submitter: str | None = None,
        tags: Collection[str] = (),
    ) -> list[JobRecord]:
        """What `jobs` finds, of each request the fields `LISTED` alone: a whole one may be a megabyte."""

    def jobs_of(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """What `exact_jobs` finds, id by id."""
        found = self.exact_jobs(set(job_ids))
        return [found.get(job_id) for job_id in job_ids]

    def submit(self, request: Mapping[str, Any], submission: Submission) -> tuple[JobRecord, bool]:
        """Open a job for the workers, in state QUEUED; return it, and whether it is new.

        A submission whose key the same submitter used before, with the same body, returns the job of then.

        Raises:
            SubmissionConflictError: the key was used with another body.
            QuotaExceededError: the submitter may not have one more, or not one of this size.
        """
        answer = self.submit_all([(request, submission)])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @abstractmethod
    def submit_all(
        self, submissions: Sequence[tuple[Mapping[str, Any], Submission]]
    ) -> list[tuple[JobRecord, bool] | SubmissionConflictError | QuotaExceededError]:
        """Submit several jobs in one transaction. Each has what `submit` would return, or raise, one after another."""

    @abstractmethod
    def ask(self, job_id: str, wanted: Ask, budget: Mapping[str, Any] | None = None, for_worker: bool = True) -> JobRecord:
        """Ask for a change. What nobody holds changes at once; a holder learns of it by the state in its lease.

        Asking for what is under way or done already changes nothing; of two things asked of a running job the stronger holds
        (cancel over stop over pause).

        Args:
            job_id: the job.
            wanted: what is asked for.
            budget: with RESUME, `trials` or `max_seconds` in all, which the request has from now on. A job that SUCCEEDED goes
                on where one of them is larger than before, or where it was stopped by a person.
            for_worker: with RESUME, whether a worker may take the job; else it waits for a process that names it.

        Raises:
            UnknownJobError: there is none.
            JobStateError: it does not fit the job's state.
            QuotaExceededError: the job would wait again, and its submitter may have no more that wait.
        """

    @abstractmethod
    def change_request(self, job_id: str, version: int | None, changes: Mapping[str, Any]) -> JobRecord:
        """Set fields of the job's request; with `version`, only where the job still is at it.

        Raises:
            UnknownJobError: there is none.
            JobStateError: the job has ended and a field is not one of LABELS, or it has changed since that version.
            QuotaExceededError: the submitter may keep no more bytes.
        """

    @abstractmethod
    def delete_job(self, job_id: str) -> None:
        """Remove a job and all that belongs to it.

        Raises:
            UnknownJobError: there is none.
            LeaseHeldError: a live process holds it.
        """

    # leases

    @abstractmethod
    def acquire(self, job_id: str, owner: Owner, seconds: float = 30.0) -> Lease:
        """Take the job: at once where it is free, its lease has expired, or its holder is a process of this host that is dead.

        The job becomes RUNNING. Attempts that the former holder left running become `abandoned`: their trials are wanted again.

        Raises:
            UnknownJobError: there is none.
            LeaseHeldError: a live process holds it; the message names host and process.
        """

    @abstractmethod
    def claim(self, owner: Owner, seconds: float = 30.0, limits: QueueLimits | None = None) -> Lease | None:
        """Take the next job of the queue; None: there is nothing to do.

        First what a process that is gone left behind, in the state that it was in; then QUEUED jobs by priority, then whoever
        has the fewest running jobs, then in order of queueing. A job is claimed by one process alone.
        """

    @abstractmethod
    def heartbeat(self, lease: Lease, seconds: float = 30.0) -> Lease:
        """Extend the lease and add the time since the last heartbeat to the job's active seconds."""

    @abstractmethod
    def release(
        self, lease: Lease, state: JobState, reason: str, message: str, request: Mapping[str, Any] | None = None
    ) -> JobRecord:
        """Give the job back in `state`. Attempts that still run become `abandoned`.

        Raises:
            JobStateError: the job's request is no longer `request`, on which the holder's decision rests: it is to decide anew.
        """

    # trials

    @abstractmethod
    def add_trial(
        self,
        lease: Lease,
        config: TrialConfig,
        purpose: Purpose,
        fidelity: str = "full",
        repeat: int = 0,
        refusal: TrialResult | None = None,
    ) -> TrialRecord:
        """Record a wanted trial, or return the one that is there already (same config, purpose, fidelity and repeat).

        With `refusal` the candidate was refused before it reached a device: it is kept with that outcome and not counted.
        A refusal of a trial that is there closes it where no attempt was started yet, and is ignored otherwise.
        """

    @abstractmethod
    def trials(self, job_id: str) -> list[TrialRecord]:
        """All trials of a job by number, refused ones included; empty for a job that does not exist."""

    @abstractmethod
    def figures_of(self, job_id: str, first: int = 0, limit: int | None = None) -> list[TrialRecord]:
        """All trials of a job with a number of at least `first`, by number, of one moment, with the figures of their results;
        of more than `limit` the first ones.

        A result has outcome, message, rule, cause, rate, peak, and how far they hold; what goes with each rank and step is left
        out, so that all trials of a job fit in memory at once.
        """

    @abstractmethod
    def overviews(self, job_ids: Collection[str]) -> dict[str, Overview]:
        """How far these jobs are."""

    @abstractmethod
    def placements(self, job_id: str, first: int = 0) -> dict[int, Placement]:
        """Since when and where each trial with a number of at least `first` runs, or ran when its result was accepted."""

    @abstractmethod
    def trial_page(self, job_id: str, first: int = 0, limit: int = 1000) -> list[TrialRecord]:
        """Trials of a job with a number of at least `first`, by number."""

    @abstractmethod
    def plain_trials(self, job_id: str, first: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """As `trial_page`, as plain data for who only passes it on.

        Each is number, purpose, fidelity, repeat, counted, outcome, config, attempts, created, started, finished, and result,
        which lacks the attempt's token.
        """

    @abstractmethod
    def start_attempt(self, lease: Lease, trial_number: int) -> AttemptRecord:
        """Open an attempt with a fresh token; a trial of purpose `search` is counted from now on.

        An attempt of the same trial that still runs becomes `abandoned`.

        Raises:
            UnknownTrialError: there is no such trial, or it has its outcome already.
        """

    @abstractmethod
    def finish_attempt(self, lease: Lease, result: TrialResult, retry: bool = False) -> bool:
        """Record the result of `result.attempt`, with its rank measurements.

        Returns True where it was accepted: the attempt is its trial's current one, and becomes `accepted` (the trial has its
        outcome) or, with `retry`, `retried` (the trial stays wanted). A result of an attempt that is no longer current is
        kept as `superseded`, never counted: False. The first result of an attempt stays: given twice, the answer is the same.

        Raises:
            UnknownTrialError: the job has no such attempt.
        """

    @abstractmethod
    def attempts(self, job_id: str, trial_number: int | None = None) -> list[AttemptRecord]:
        """All attempts of a job or of one of its trials, oldest first."""

    @abstractmethod
    def set_reference_losses(self, lease: Lease, losses: Sequence[float]) -> None:
        """Set the losses that later trials are held against. The first setting stays; later ones are ignored."""

    @abstractmethod
    def set_answer(self, lease: Lease, answer: Mapping[str, Any] | None) -> None:
        """Keep what the job has found so far, as plain data, in place of what was kept before."""

    @abstractmethod
    def set_prior(self, lease: Lease, prior: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep what the job knows before its first trial, as plain data; return what is kept. The first setting stays."""

    @abstractmethod
    def prior(self, job_id: str) -> Mapping[str, Any] | None:
        """What the job of exactly this id knew before its first trial; None: nothing was kept."""

    # output

    @abstractmethod
    def add_output(self, lease: Lease, lines: Sequence[LogLines], progress: Sequence[Progress] = ()) -> None:
        """Keep what ranks printed, and what they do now, in one transaction: callers collect it for some tenths of a second.

        Of each attempt the first LOG_HEAD_BYTES and the last LOG_TAIL_BYTES are kept, give or take a part; which bytes lie
        between can be told by `LogRecord.start`. Attempts that are no longer current keep theirs too.

        Raises:
            UnknownTrialError: the job has no such attempt.
        """

    @abstractmethod
    def logs(
        self,
        job_id: str,
        trial_number: int,
        after: int = 0,
        limit: int = 1000,
        attempt: int | None = None,
        rank: int | None = None,
    ) -> list[LogRecord]:
        """What the ranks of a trial printed beyond the part `after`, in order; of one attempt or rank, or of all."""

    @abstractmethod
    def log_news(self, known: Mapping[tuple[str, int], int], limit: int = 1000) -> dict[tuple[str, int], LogNews]:
        """What is new of trials' output: (job, trial) -> sequence of the last part that is known. Missing: trials not there."""

    @abstractmethod
    def progress(self, job_ids: Collection[str]) -> dict[str, list[ProgressRecord]]:
        """What each running attempt of these jobs did when it was heard last, by trial."""

    # events

    @abstractmethod
    def add_event(self, lease: Lease, kind: str, payload: Mapping[str, Any]) -> EventRecord:
        """Add an event that no other method writes."""

    @abstractmethod
    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[EventRecord]:
        """Events of a job with a sequence above `after`, in order."""

    @abstractmethod
    def news(self, known: Mapping[str, int], limit: int = 1000) -> dict[str, JobNews]:
        """What is new of jobs, as far as they are there: `known` has the sequence of each one's last event that is known.

        All of it is of one moment; of each job there are at most `limit` events.
        """

    @abstractmethod
    def figures(self) -> Figures:
        """Counts over all jobs. A database that is away is not waited for."""

    @abstractmethod
    def revision(self) -> str:
        """The revision of the tables, asked for now. A database that is away is not waited for."""

    # API keys

    @abstractmethod
    def check_writable(self) -> None:
        """Find out, without waiting, whether something can be written.

        Raises:
            DatabaseUnavailableError: the disk is full, or nearly, or the database is not there.
        """

    @abstractmethod
    def create_key(self, owner: str, scopes: Collection[str], expires: datetime | None = None) -> tuple[ApiKey, str]:
        """Make a key; return it and its text, which nobody can be told again."""

    @abstractmethod
    def authenticate(self, text: str) -> ApiKey | None:
        """The key of that text; None: it is no key, or it was revoked, or has expired. Waits for no writer."""

    @abstractmethod
    def note_key_use(self, key: ApiKey) -> None:
        """Write down that the key was used, to the minute."""

    @abstractmethod
    def revoke_key(self, key_id: str) -> ApiKey:
        """End a key.

        Raises:
            UnknownKeyError: there is none.
        """

    @abstractmethod
    def keys(self) -> list[ApiKey]:
        """All keys, oldest first."""

    # the audit log

    @abstractmethod
    def audit(
        self,
        limit: int = 1000,
        before: str | None = None,
        since: datetime | None = None,
        actor: str | None = None,
        action: str | None = None,
    ) -> list[AuditRecord]:
        """What was done, newest first: before the entry of that id, not before `since`, by one actor, of one kind."""

    # quotas

    @abstractmethod
    def limits(self, owner: str, defaults: Quotas) -> Quotas:
        """The limits of an owner: their own where they have some, else the default ones."""

    @abstractmethod
    def quotas(self, owner: str, defaults: Quotas) -> list[QuotaUse]:
        """What an owner may take and has taken; of streams nobody here knows how many there are: 0."""

    @abstractmethod
    def set_quota(self, owner: str, quota: Quota, most: float | None) -> None:
        """Give an owner a limit of their own, `math.inf` being none; None: the default one again."""

    @abstractmethod
    def owners(self) -> list[str]:
        """Whoever has a key, or limits of their own."""

    # workers

    @abstractmethod
    def beat(self, worker: WorkerRecord) -> None:
        """Write down that a worker lives, and what it does. Its times are the store's own."""

    @abstractmethod
    def retire(self, worker_id: str) -> None:
        """Forget a worker, if it is known."""

    @abstractmethod
    def workers(self, seconds: float = 60.0) -> list[WorkerRecord]:
        """The workers that told of themselves within the last `seconds`."""

    @abstractmethod
    def usage(self, submitter: str) -> Usage:
        """What the jobs of a submitter take, today in UTC."""

    # webhooks

    @abstractmethod
    def create_webhook(self, owner: str, url: str) -> Webhook:
        """Let `url` be told when jobs of `owner` end. Whether it may be called is the caller's affair.

        Raises:
            QuotaExceededError: the owner has as many as they may have.
            SecretError: its secret cannot be encrypted.
        """

    @abstractmethod
    def signing_secret(self, webhook: Webhook) -> str:
        """What the deliveries of a webhook are signed with.

        Raises:
            SecretError: no key decrypts it.
        """

    @abstractmethod
    def webhooks(self, owner: str | None = None) -> list[Webhook]:
        """The webhooks of an owner, oldest first; None: everybody's."""

    @abstractmethod
    def delete_webhook(self, webhook_id: str) -> None:
        """Remove a webhook and its log.

        Raises:
            UnknownWebhookError: there is none.
        """

    @abstractmethod
    def claim_deliveries(
        self, limit: int = 10, seconds: float = 60.0, most: int | None = None, running: Mapping[str, int] | None = None
    ) -> list[Delivery]:
        """Deliveries that are due, for this caller alone during `seconds`. One that is not finished then is due again.

        Owners take turns. With `most` none has more than so many at a time, of which `running` are under way already.
        """

    @abstractmethod
    def postpone_deliveries(self, webhook_id: str, wait: float) -> int:
        """Let nothing of a webhook be due for so many seconds; return how many deliveries wait for that."""

    @abstractmethod
    def finish_delivery(self, delivery_id: str, tried: DeliveryTry | None, state: DeliveryState, wait: float = 0.0) -> None:
        """Write down a try, or None for one that was not made; a delivery that stays PENDING is due after `wait` seconds."""

    @abstractmethod
    def deliveries(self, webhook_id: str, limit: int = 50) -> list[Delivery]:
        """The newest deliveries of a webhook first."""

    # calibrations

    @abstractmethod
    def save_calibration(
        self, fingerprint: str, cluster: ClusterSpec, result: MicrobenchmarkResult, seconds: float
    ) -> CalibrationRecord:
        """Keep what a micro-benchmark measured; `fingerprint` tells the hardware, in at most 16 characters."""

    @abstractmethod
    def calibrations(self, fingerprint: str | None = None, limit: int = 50) -> list[CalibrationRecord]:
        """The newest micro-benchmarks first, of a fingerprint or of all."""

    # nodes

    @abstractmethod
    def quarantine_node(self, lease: Lease, node: str, reason: str, seconds: float) -> QuarantineRecord:
        """Keep every job off a node for so many seconds from now, and tell it as an event of the lease's job.

        A node that is in quarantine already gets the new reason and time.
        """

    @abstractmethod
    def quarantined_nodes(self) -> list[QuarantineRecord]:
        """The nodes in quarantine now, by name."""

    @abstractmethod
    def release_node(self, node: str) -> bool:
        """Let jobs use a node again; return whether it was in quarantine."""

    # files

    @abstractmethod
    def dump(self, sink: TextIO, job_id: str | None = None) -> int:
        """Write a job, or with None everything, as JSON Lines (storage.transfer) from one snapshot; return the count of rows.

        `sink` is emptied first; it must be seekable.

        Raises:
            UnknownJobError: there is no such job.
        """

    @abstractmethod
    def load_job(self, source: TextIO, submitter: str = "") -> str:
        """Read what `dump` wrote of a job, all of it or nothing; return the job's id.

        It is the job of `submitter` here, whoever it was of there, and is PAUSED if it had not ended.

        Raises:
            TransferError: it is no such file, is cut off or newer, or holds what is here already or belongs to no such job.
        """

    @abstractmethod
    def load(self, source: TextIO) -> list[str]:
        """Read what `dump` wrote of everything, all of it or nothing; return the ids of the jobs.

        Jobs that ran go on as after a crash of their processes.

        Raises:
            TransferError: it is no such file, is cut off or newer, or there are jobs already.
        """

    @abstractmethod
    def damages(self) -> list[Damage]:
        """Every row that cannot be read. No other method fails for one, but those that are about that job alone."""

    @abstractmethod
    def prune(self, before: datetime) -> Pruned:
        """Remove events and output of jobs that ended before, submission keys, finished deliveries, replaced calibrations."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection. May be called twice."""

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
