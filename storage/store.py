"""The interface of a store."""

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
    """Jobs, trials, attempts and events, stored such that any process can be killed at any point.

    - Each method is one atomic transaction, which includes its event rows.
    - Methods that take a `Lease` raise LeaseLostError, and write nothing, if the lease is no longer the job's current one.
      An expired lease stays current until another process takes the job: expiry only permits the takeover.
    - A store may be used from several threads, and a database from several processes.
    - Times are UTC.

    Raises:
        DatabaseUnavailableError: the database cannot be reached or written.
    """

    @abstractmethod
    def by(self, actor: Actor) -> "Store":
        """Return the same store for another actor: the audit log names them, and their quotas apply. It needs no closing.

        An opened store acts for the user of this process, who has no quotas.
        """

    # jobs

    @abstractmethod
    def create_job(self, request: Mapping[str, Any]) -> JobRecord:
        """Create a job in state QUEUED."""

    @abstractmethod
    def job(self, job_id: str | None = None) -> JobRecord:
        """Return a job by its id or a unique prefix of it; None or LATEST: the newest job.

        Raises:
            UnknownJobError: there is none, or the prefix matches several.
        """

    @abstractmethod
    def exact_jobs(self, job_ids: Collection[str]) -> dict[str, JobRecord]:
        """Return the existing jobs with exactly these ids."""

    @abstractmethod
    def jobs(
        self,
        limit: int = 50,
        before: str | None = None,
        states: Collection[JobState] = (),
        submitter: str | None = None,
        tags: Collection[str] = (),
    ) -> list[JobRecord]:
        """Return jobs, newest first; `before` is the id of the last job of the previous page.

        `states`, `submitter` and `tags` filter: only jobs in one of these states, of this submitter, with all of these tags.
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
        """Like `jobs`, with only the fields `LISTED` of each request: a whole request may have a megabyte."""

    def jobs_of(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """Return the result of `exact_jobs` for each id, in order; None: there is no such job."""
        found = self.exact_jobs(set(job_ids))
        return [found.get(job_id) for job_id in job_ids]

    def submit(self, request: Mapping[str, Any], submission: Submission) -> tuple[JobRecord, bool]:
        """Create a job for the workers, in state QUEUED; return it, and whether it is new.

        If the submitter has used the key before with the same body, this returns the earlier job.

        Raises:
            SubmissionConflictError: the key was used with another body.
            QuotaExceededError: the submitter may not have another job, or not one of this size.
        """
        answer = self.submit_all([(request, submission)])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @abstractmethod
    def submit_all(
        self, submissions: Sequence[tuple[Mapping[str, Any], Submission]]
    ) -> list[tuple[JobRecord, bool] | SubmissionConflictError | QuotaExceededError]:
        """Submit several jobs in one transaction. Return for each, in order, what `submit` would return or raise."""

    @abstractmethod
    def ask(self, job_id: str, wanted: Ask, budget: Mapping[str, Any] | None = None, for_worker: bool = True) -> JobRecord:
        """Request a change. A job without a holder changes immediately; a holder sees the request by the state in its lease.

        Repeating a pending or completed request changes nothing. Of two requests to a running job, the stronger one wins
        (cancel over stop over pause).

        Args:
            job_id: the job.
            wanted: the requested change.
            budget: with RESUME, the new totals of `trials` or `max_seconds`. A job that SUCCEEDED continues if one of them is
                larger than before, or if a user had stopped it.
            for_worker: with RESUME, whether a worker may take the job; else it waits for a process that names it.

        Raises:
            UnknownJobError: the job does not exist.
            JobStateError: the request does not fit the job's state.
            QuotaExceededError: the job would be queued again, and its submitter may not have another queued job.
        """

    @abstractmethod
    def change_request(self, job_id: str, version: int | None, changes: Mapping[str, Any]) -> JobRecord:
        """Set fields of the job's request; with `version`, only if the job still has this version.

        Raises:
            UnknownJobError: the job does not exist.
            JobStateError: the job has ended and a field is not one of LABELS, or it has changed since that version.
            QuotaExceededError: the submitter may not store more bytes.
        """

    @abstractmethod
    def delete_job(self, job_id: str) -> None:
        """Remove a job and all of its rows.

        Raises:
            UnknownJobError: the job does not exist.
            LeaseHeldError: a live process holds it.
        """

    # leases

    @abstractmethod
    def acquire(self, job_id: str, owner: Owner, seconds: float = 30.0) -> Lease:
        """Acquire the job, if it is free, its lease has expired, or its holder is a dead process of this host.

        The job becomes RUNNING. Running attempts of the former holder become `abandoned`: their trials are planned again.

        Raises:
            UnknownJobError: the job does not exist.
            LeaseHeldError: a live process holds it; the message names host and process.
        """

    @abstractmethod
    def claim(self, owner: Owner, seconds: float = 30.0, limits: QueueLimits | None = None) -> Lease | None:
        """Acquire the next job of the queue; None: there is nothing to do.

        Jobs of dead processes come first and keep their state. Then come QUEUED jobs: by priority, then by the fewest running
        jobs of the submitter, then in order of queueing. Only one process claims a job.
        """

    @abstractmethod
    def heartbeat(self, lease: Lease, seconds: float = 30.0) -> Lease:
        """Extend the lease and add the time since the last heartbeat to the job's active seconds."""

    @abstractmethod
    def release(
        self, lease: Lease, state: JobState, reason: str, message: str, request: Mapping[str, Any] | None = None
    ) -> JobRecord:
        """Release the job in `state`. Attempts that are still running become `abandoned`.

        Raises:
            JobStateError: the job's request is no longer `request`, on which the holder decided: it must decide again.
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
        """Record a planned trial, or return the existing one (same config, purpose, fidelity and repeat).

        With `refusal`, the candidate was refused before it reached a device: it is stored with that outcome and not counted.
        A refusal of an existing trial closes it if it has no attempt yet, else it is ignored.
        """

    @abstractmethod
    def trials(self, job_id: str) -> list[TrialRecord]:
        """Return all trials of a job by number, including refused ones; empty for a job that does not exist."""

    @abstractmethod
    def figures_of(self, job_id: str, first: int = 0, limit: int | None = None) -> list[TrialRecord]:
        """Return up to `limit` trials of a job from number `first` on, by number, at one moment, with only the figures of their
        results.

        A result has outcome, message, rule, cause, rate, peak, and their accuracy. Values per rank and step are left out, so
        that all trials of a job fit in memory.
        """

    @abstractmethod
    def overviews(self, job_ids: Collection[str]) -> dict[str, Overview]:
        """Return the progress of these jobs."""

    @abstractmethod
    def placements(self, job_id: str, first: int = 0) -> dict[int, Placement]:
        """Return start time and node of the running or accepted attempt of each trial from number `first` on."""

    @abstractmethod
    def trial_page(self, job_id: str, first: int = 0, limit: int = 1000) -> list[TrialRecord]:
        """Return trials of a job from number `first` on, by number."""

    @abstractmethod
    def plain_trials(self, job_id: str, first: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Like `trial_page`, as plain data for callers that only forward it.

        Each has number, purpose, fidelity, repeat, counted, outcome, config, attempts, created, started, finished, and result,
        which lacks the attempt's token.
        """

    @abstractmethod
    def start_attempt(self, lease: Lease, trial_number: int) -> AttemptRecord:
        """Create an attempt with a new token; a trial of purpose `search` is counted from now on.

        A running attempt of the same trial becomes `abandoned`.

        Raises:
            UnknownTrialError: the trial does not exist, or already has an outcome.
        """

    @abstractmethod
    def finish_attempt(self, lease: Lease, result: TrialResult, retry: bool = False) -> bool:
        """Record the result of `result.attempt`, with its rank measurements.

        Returns True if it was accepted: the attempt is its trial's current one, and becomes `accepted` (the trial gets its
        outcome) or, with `retry`, `retried` (the trial stays planned). False: the attempt is no longer current; its result is
        stored as `superseded` and never counted. The first result of an attempt stays; a repeated call returns the same.

        Raises:
            UnknownTrialError: the job has no such attempt.
        """

    @abstractmethod
    def attempts(self, job_id: str, trial_number: int | None = None) -> list[AttemptRecord]:
        """Return all attempts of a job or of one of its trials, oldest first."""

    @abstractmethod
    def set_reference_losses(self, lease: Lease, losses: Sequence[float]) -> None:
        """Set the losses that later trials are compared with. The first call counts; later ones are ignored."""

    @abstractmethod
    def set_answer(self, lease: Lease, answer: Mapping[str, Any] | None) -> None:
        """Store the job's answer so far as plain data, replacing the previous one."""

    @abstractmethod
    def set_prior(self, lease: Lease, prior: Mapping[str, Any]) -> Mapping[str, Any]:
        """Store the job's prior as plain data; return the stored one. The first call counts."""

    @abstractmethod
    def prior(self, job_id: str) -> Mapping[str, Any] | None:
        """Return the prior of the job with exactly this id; None: it has none."""

    # output

    @abstractmethod
    def add_output(self, lease: Lease, lines: Sequence[LogLines], progress: Sequence[Progress] = ()) -> None:
        """Store output and progress of ranks in one transaction: callers collect it for some tenths of a second.

        The first LOG_HEAD_BYTES and the last LOG_TAIL_BYTES of each attempt are kept, to the precision of a part;
        `LogRecord.start` shows what is missing in between. The output of former attempts is kept too.

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
        """Return the output of a trial's ranks after the part `after`, in order; of one attempt or rank, or of all."""

    @abstractmethod
    def log_news(self, known: Mapping[tuple[str, int], int], limit: int = 1000) -> dict[tuple[str, int], LogNews]:
        """Return new output of trials. `known`: (job, trial) -> sequence of the last known part. Omits unknown trials."""

    @abstractmethod
    def progress(self, job_ids: Collection[str]) -> dict[str, list[ProgressRecord]]:
        """Return the last progress of each running attempt of these jobs, by trial."""

    # events

    @abstractmethod
    def add_event(self, lease: Lease, kind: str, payload: Mapping[str, Any]) -> EventRecord:
        """Add an event that no other method writes."""

    @abstractmethod
    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[EventRecord]:
        """Return events of a job with a sequence above `after`, in order."""

    @abstractmethod
    def news(self, known: Mapping[str, int], limit: int = 1000) -> dict[str, JobNews]:
        """Return the news of the existing jobs. `known`: job -> sequence of its last known event.

        All news are from one moment, with at most `limit` events for each job.
        """

    @abstractmethod
    def figures(self) -> Figures:
        """Return counts over all jobs. Does not wait for an unavailable database."""

    @abstractmethod
    def revision(self) -> str:
        """Read the revision of the tables. Does not wait for an unavailable database."""

    # API keys

    @abstractmethod
    def check_writable(self) -> None:
        """Check, without waiting, that the database can be written.

        Raises:
            DatabaseUnavailableError: the disk is full, or nearly, or the database is unavailable.
        """

    @abstractmethod
    def create_key(self, owner: str, scopes: Collection[str], expires: datetime | None = None) -> tuple[ApiKey, str]:
        """Create a key; return it and its text, which cannot be retrieved again."""

    @abstractmethod
    def authenticate(self, text: str) -> ApiKey | None:
        """Return the key with this text; None: it is invalid, revoked or expired. Does not wait for writers."""

    @abstractmethod
    def note_key_use(self, key: ApiKey) -> None:
        """Record the use of the key, to the minute."""

    @abstractmethod
    def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke a key.

        Raises:
            UnknownKeyError: the key does not exist.
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
        """Return audit entries, newest first: before the entry with id `before`, since `since`, of one actor, of one action."""

    # quotas

    @abstractmethod
    def limits(self, owner: str, defaults: Quotas) -> Quotas:
        """Return the limits of an owner: their own ones if set, else the defaults."""

    @abstractmethod
    def quotas(self, owner: str, defaults: Quotas) -> list[QuotaUse]:
        """Return limits and use of an owner. The use of streams is always 0, because the store does not know it."""

    @abstractmethod
    def set_quota(self, owner: str, quota: Quota, most: float | None) -> None:
        """Set an owner's limit, `math.inf` for no limit; None: restore the default."""

    @abstractmethod
    def owners(self) -> list[str]:
        """Return all owners with a key or their own limits."""

    # workers

    @abstractmethod
    def beat(self, worker: WorkerRecord) -> None:
        """Record a worker's heartbeat and state. The store sets its times."""

    @abstractmethod
    def retire(self, worker_id: str) -> None:
        """Remove a worker, if it is known."""

    @abstractmethod
    def workers(self, seconds: float = 60.0) -> list[WorkerRecord]:
        """Return the workers with a heartbeat within the last `seconds`."""

    @abstractmethod
    def usage(self, submitter: str) -> Usage:
        """Return the usage of a submitter's jobs today (UTC)."""

    # webhooks

    @abstractmethod
    def create_webhook(self, owner: str, url: str) -> Webhook:
        """Notify `url` when jobs of `owner` end. The caller must check that the address is allowed.

        Raises:
            QuotaExceededError: the owner has used up their webhooks.
            SecretError: its secret cannot be encrypted.
        """

    @abstractmethod
    def signing_secret(self, webhook: Webhook) -> str:
        """Return the secret that signs the deliveries of a webhook.

        Raises:
            SecretError: no key decrypts it.
        """

    @abstractmethod
    def webhooks(self, owner: str | None = None) -> list[Webhook]:
        """Return the webhooks of an owner, oldest first; None: of all owners."""

    @abstractmethod
    def delete_webhook(self, webhook_id: str) -> None:
        """Remove a webhook and its log.

        Raises:
            UnknownWebhookError: the webhook does not exist.
        """

    @abstractmethod
    def claim_deliveries(
        self, limit: int = 10, seconds: float = 60.0, most: int | None = None, running: Mapping[str, int] | None = None
    ) -> list[Delivery]:
        """Claim due deliveries for this caller for `seconds`. A delivery that is not finished by then is due again.

        Owners take turns. With `most`, an owner has at most that many at a time, including the `running` ones.
        """

    @abstractmethod
    def postpone_deliveries(self, webhook_id: str, wait: float) -> int:
        """Postpone the deliveries of a webhook by at least `wait` seconds; return how many were postponed."""

    @abstractmethod
    def finish_delivery(self, delivery_id: str, tried: DeliveryTry | None, state: DeliveryState, wait: float = 0.0) -> None:
        """Record a try (None: there was no try) and the state; a delivery that stays PENDING is due after `wait` seconds."""

    @abstractmethod
    def deliveries(self, webhook_id: str, limit: int = 50) -> list[Delivery]:
        """Return the deliveries of a webhook, newest first."""

    # calibrations

    @abstractmethod
    def save_calibration(
        self, fingerprint: str, cluster: ClusterSpec, result: MicrobenchmarkResult, seconds: float
    ) -> CalibrationRecord:
        """Store the result of a micro-benchmark; `fingerprint` identifies the hardware, in at most 16 characters."""

    @abstractmethod
    def calibrations(self, fingerprint: str | None = None, limit: int = 50) -> list[CalibrationRecord]:
        """Return micro-benchmarks, newest first, of one fingerprint or of all."""

    # nodes

    @abstractmethod
    def quarantine_node(self, lease: Lease, node: str, reason: str, seconds: float) -> QuarantineRecord:
        """Put a node in quarantine for `seconds`, so that all jobs avoid it, and write an event of the lease's job.

        A node that is already in quarantine gets the new reason and time.
        """

    @abstractmethod
    def quarantined_nodes(self) -> list[QuarantineRecord]:
        """Return the nodes that are in quarantine now, by name."""

    @abstractmethod
    def release_node(self, node: str) -> bool:
        """End the quarantine of a node; return whether it was in quarantine."""

    # files

    @abstractmethod
    def dump(self, sink: TextIO, job_id: str | None = None) -> int:
        """Write a job, or with None everything, as JSON Lines (storage.transfer) from one snapshot; return the count of rows.

        `sink` is truncated first; it must be seekable.

        Raises:
            UnknownJobError: the job does not exist.
        """

    @abstractmethod
    def load_job(self, source: TextIO, submitter: str = "") -> str:
        """Import a job's file that `dump` wrote, atomically; return the job's id.

        The job then belongs to `submitter`, and is PAUSED if it had not ended.

        Raises:
            TransferError: the file is invalid, truncated or newer, or has rows that exist here or belong to another job.
        """

    @abstractmethod
    def load(self, source: TextIO) -> list[str]:
        """Restore a backup that `dump` wrote, atomically; return the ids of the jobs.

        Jobs that were running continue as after a crash of their processes.

        Raises:
            TransferError: the file is invalid, truncated or newer, or the database has jobs already.
        """

    @abstractmethod
    def damages(self) -> list[Damage]:
        """Return all rows that cannot be read. Such a row only fails methods about its own job."""

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
