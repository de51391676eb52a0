"""The store, in an SQLite file or in PostgreSQL.

This module loads SQLAlchemy. Modules of commands that need no database import `Store` for type checking only.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TextIO, TypeVar

from sqlalchemy.orm import Session

from search_spaces.clusters.cluster import ClusterSpec
from search_spaces.clusters.microbenchmark import MicrobenchmarkResult
from search_spaces.outcome import JobState, Purpose
from search_spaces.trial import LogLines, Progress, TrialResult
from search_spaces.trial_config import TrialConfig
from storage import (
    attempts,
    audit,
    calibrations,
    damage,
    events,
    figures,
    jobs,
    keys,
    logs,
    overviews,
    priors,
    quarantine,
    queue,
    quotas,
    retention,
    transfer,
    trials,
    webhooks,
    workers,
)
from storage.address import check_file, describe, parse_address
from storage.codec import job_record
from storage.database import OUTAGE_SECONDS, Database
from storage.errors import QuotaExceededError, SubmissionConflictError
from storage.log_records import LogNews, LogRecord, ProgressRecord
from storage.migrations import migrate, stored_revision
from storage.private_files import make_private_file
from storage.records import (
    ANY_JOB,
    AnsweredJob,
    ApiKey,
    Ask,
    AttemptPlacement,
    AttemptRecord,
    CalibrationRecord,
    EventRecord,
    Figures,
    JobFilter,
    JobNews,
    JobRecord,
    Lease,
    Overview,
    Owner,
    QuarantineRecord,
    QueueLimits,
    Submission,
    TrialRecord,
)
from storage.secret_box import SecretBox
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

P = ParamSpec("P")
T = TypeVar("T")


def open_store(url: str, busy_seconds: float = 5.0) -> "Store":
    """Open the store at `url`, create or migrate it if needed, and check that it can be written.

    Args:
        url: path of an SQLite file, `sqlite:///PATH`, or `postgresql://…`.
        busy_seconds: how long each transaction waits for another process's lock.

    Raises:
        DatabaseUnavailableError: it cannot be opened or written, is locked, or has an unknown schema.
    """
    return Store(url, busy_seconds)


class Store:
    """Jobs, trials, attempts and events, stored such that any process can be killed at any point.

    Each method runs a function of the module for its topic.

    - Each method is one atomic transaction, which includes its event rows.
    - Methods that take a `Lease` raise LeaseLostError, and write nothing, if the lease is no longer the job's current one.
      An expired lease stays current until another process takes the job: expiry only permits the takeover.
    - A store may be used from several threads, and a database from several processes.
    - Times are UTC.

    Raises:
        DatabaseUnavailableError: the database cannot be reached or written.
    """

    def __init__(
        self,
        url: str,
        busy_seconds: float = 5.0,
        clock: Callable[[], datetime] | None = None,
        outage_seconds: float = OUTAGE_SECONDS,
    ) -> None:
        """Open the database; see `open_store`. `clock` returns the time in UTC; None: the database's clock."""
        address = parse_address(url)
        location = describe(address)
        if address.get_backend_name() == "sqlite":
            check_file(Path(location))
            make_private_file(Path(location))  # SQLite creates its journals with the mode of the file
        self._clock = clock
        self._database = Database(address, busy_seconds, outage_seconds)
        self._secret_box = SecretBox(address)
        self._actor = audit.local_actor()
        try:
            self._database.migrate(lambda session: migrate(session.connection(), location))
        except BaseException:
            self._database.close()
            raise

    def by(self, actor: Actor) -> "Store":
        """Return the same store for another actor: the audit log names them, and their quotas apply. It needs no closing.

        An opened store acts for the user of this process, who has no quotas.
        """
        other = copy.copy(self)
        other._actor = actor
        return other

    # jobs

    def create_job(self, request: Mapping[str, Any], devices: int = 1) -> JobRecord:
        """Create a job in state QUEUED, whose trials take this many devices."""
        return self._write(jobs.create_job, request, devices, self._actor)

    def job(self, job_id: str | None = None) -> JobRecord:
        """Return a job by its id or a unique prefix of it; None or LATEST: the newest job.

        Raises:
            UnknownJobError: there is none, or the prefix matches several.
        """
        return self._database.read(lambda session: job_record(jobs.find_job(session, job_id)))

    def exact_jobs(self, job_ids: Collection[str]) -> dict[str, JobRecord]:
        """Return the existing jobs with exactly these ids."""
        return self._read(jobs.exact_jobs, job_ids)

    def jobs(self, limit: int = 50, before: str | None = None, having: JobFilter = ANY_JOB) -> list[JobRecord]:
        """Return jobs, newest first; `before` is the id of the last job of the previous page."""
        return self._read(jobs.jobs, limit, before, having)

    def job_summaries(self, limit: int = 50, before: str | None = None, having: JobFilter = ANY_JOB) -> list[JobRecord]:
        """Like `jobs`, with only the fields `LISTED` of each request: a whole request may have a megabyte."""
        return self._read(jobs.job_summaries, limit, before, having)

    def answered_jobs(self, limit: int, submitter: str | None = None) -> list[AnsweredJob]:
        """Like `job_summaries`, of jobs with an answer."""
        return self._read(jobs.answered_jobs, limit, submitter)

    def jobs_of(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """Return the result of `exact_jobs` for each id, in order; None: there is no such job."""
        jobs_by_id = self.exact_jobs(set(job_ids))
        return [jobs_by_id.get(job_id) for job_id in job_ids]

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

    def submit_all(
        self, submissions: Sequence[tuple[Mapping[str, Any], Submission]]
    ) -> list[tuple[JobRecord, bool] | SubmissionConflictError | QuotaExceededError]:
        """Submit several jobs in one transaction. Return for each, in order, what `submit` would return or raise."""
        return self._write(queue.submit_all, submissions, self._actor)

    def ask(self, job_id: str, change: Ask, budget: Mapping[str, Any] | None = None, for_worker: bool = True) -> JobRecord:
        """Request a change. A job without a holder changes immediately; a holder sees the request by the state in its lease.

        Repeating a pending or completed request changes nothing. Of two requests to a running job, the stronger one wins
        (cancel over stop over pause).

        Args:
            job_id: the job.
            change: the requested change.
            budget: with RESUME, the new totals of `trials` or `max_seconds`. A job that SUCCEEDED continues if one of them is
                larger than before, or if a user had stopped it.
            for_worker: with RESUME, whether a worker may take the job; else it waits for a process that names it.

        Raises:
            UnknownJobError: the job does not exist.
            JobStateError: the request does not fit the job's state.
            QuotaExceededError: the job would be queued again, and its submitter may not have another queued job.
        """
        return self._write(queue.ask, job_id, change, budget or {}, for_worker, self._actor)

    def change_request(self, job_id: str, version: int | None, changes: Mapping[str, Any]) -> JobRecord:
        """Set fields of the job's request; with `version`, only if the job still has this version.

        Raises:
            UnknownJobError: the job does not exist.
            JobStateError: the job has ended and a field is not one of LABELS, or it has changed since that version.
            QuotaExceededError: the submitter may not store more bytes.
        """
        return self._write(queue.change_request, job_id, version, changes, self._actor)

    def delete_job(self, job_id: str) -> None:
        """Remove a job and all of its rows.

        Raises:
            UnknownJobError: the job does not exist.
            LeaseHeldError: a live process holds it.
        """
        self._write(jobs.delete_job, job_id, self._actor)

    # leases

    def acquire(self, job_id: str, owner: Owner, seconds: float = 30.0) -> Lease:
        """Acquire the job, if it is free, its lease has expired, or its holder is a dead process of this host.

        The job becomes RUNNING. Running attempts of the former holder become `abandoned`: their trials are planned again.

        Raises:
            UnknownJobError: the job does not exist.
            LeaseHeldError: a live process holds it; the message names host and process.
        """
        return self._write(jobs.acquire, job_id, owner, seconds)

    def claim(self, owner: Owner, seconds: float = 30.0, limits: QueueLimits | None = None) -> Lease | None:
        """Acquire the next job of the queue; None: there is nothing to do.

        Jobs of dead processes come first and keep their state. Then come QUEUED jobs: by priority, then by the fewest running
        jobs of the submitter, then in order of queueing. Only one process claims a job.
        """
        return self._write(queue.claim, owner, seconds, limits or QueueLimits())

    def heartbeat(self, lease: Lease, seconds: float = 30.0) -> Lease:
        """Extend the lease and add the time since the last heartbeat to the job's active seconds."""
        return self._write(jobs.heartbeat, lease, seconds)

    def release(
        self, lease: Lease, state: JobState, reason: str, message: str, request: Mapping[str, Any] | None = None
    ) -> JobRecord:
        """Release the job in `state`. Attempts that are still running become `abandoned`.

        Raises:
            JobStateError: the job's request is no longer `request`, on which the holder decided: it must decide again.
        """
        return self._write(jobs.release, lease, state, reason, message, request)

    # trials

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
        return self._write(trials.add_trial, lease, config, purpose, fidelity, repeat, refusal)

    def trials(self, job_id: str) -> list[TrialRecord]:
        """Return all trials of a job by number, including refused ones; empty for a job that does not exist."""
        return self._read(trials.trials, job_id)

    def figures_of(self, job_id: str, first: int = 0, limit: int | None = None) -> list[TrialRecord]:
        """Return up to `limit` trials of a job from number `first` on, by number, at one moment, with only the figures of their
        results.

        A result has outcome, message, rule, cause, rate, peak, and their accuracy. Values per rank and step are left out, so
        that all trials of a job fit in memory.
        """
        return self._read(trials.figures_of, job_id, first, limit)

    def overviews(self, job_ids: Collection[str]) -> dict[str, Overview]:
        """Return the progress of these jobs."""
        return self._read(overviews.overviews, job_ids)

    def placements(self, job_id: str, first: int = 0) -> dict[int, AttemptPlacement]:
        """Return start time and node of the running or accepted attempt of each trial from number `first` on."""
        return self._read(attempts.placements, job_id, first)

    def trial_page(self, job_id: str, first: int = 0, limit: int = 1000) -> list[TrialRecord]:
        """Return trials of a job from number `first` on, by number."""
        return self._read(trials.trials, job_id, first, limit)

    def plain_trials(self, job_id: str, first: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Like `trial_page`, as plain data for callers that only forward it.

        Each has number, purpose, fidelity, repeat, counted, outcome, config, attempts, created, started, finished, and result,
        which lacks the attempt's token.
        """
        return self._read(trials.plain_trials, job_id, first, limit)

    def start_attempt(self, lease: Lease, trial_number: int) -> AttemptRecord:
        """Create an attempt with a new token; a trial of purpose `search` is counted from now on.

        A running attempt of the same trial becomes `abandoned`.

        Raises:
            UnknownTrialError: the trial does not exist, or already has an outcome.
        """
        return self._write(attempts.start_attempt, lease, trial_number)

    def finish_attempt(self, lease: Lease, result: TrialResult, retry: bool = False) -> bool:
        """Record the result of `result.attempt`, with its rank measurements.

        Returns True if it was accepted: the attempt is its trial's current one, and becomes `accepted` (the trial gets its
        outcome) or, with `retry`, `retried` (the trial stays planned). False: the attempt is no longer current; its result is
        stored as `superseded` and never counted. The first result of an attempt stays; a repeated call returns the same.

        Raises:
            UnknownTrialError: the job has no such attempt.
        """
        prepared = attempts.prepare(result)
        try:
            return self._write(attempts.finish_running, lease, prepared, retry)
        except attempts.NotRunningError:
            return self._write(attempts.finish_attempt, lease, result, retry)

    def attempts(self, job_id: str, trial_number: int | None = None) -> list[AttemptRecord]:
        """Return all attempts of a job or of one of its trials, oldest first."""
        return self._read(attempts.attempts, job_id, trial_number)

    def set_reference_losses(self, lease: Lease, losses: Sequence[float]) -> None:
        """Set the losses that later trials are compared with. The first call counts; later ones are ignored."""
        self._write(jobs.set_reference_losses, lease, losses)

    def set_answer(self, lease: Lease, answer: Mapping[str, Any] | None) -> None:
        """Store the job's answer so far as plain data, replacing the previous one."""
        self._write(jobs.set_answer, lease, None if answer is None else dict(answer))

    def set_prior(self, lease: Lease, prior: Mapping[str, Any]) -> Mapping[str, Any]:
        """Store the job's prior as plain data; return the stored one. The first call counts."""
        return self._write(priors.set_prior, lease, prior)

    def prior(self, job_id: str) -> Mapping[str, Any] | None:
        """Return the prior of the job with exactly this id; None: it has none."""
        return self._read(priors.prior, job_id)

    # output

    def add_output(self, lease: Lease, lines: Sequence[LogLines], progress: Sequence[Progress] = ()) -> None:
        """Store output and progress of ranks in one transaction: callers collect it for some tenths of a second.

        The first LOG_HEAD_BYTES and the last LOG_TAIL_BYTES of each attempt are kept, to the precision of a part;
        `LogRecord.start` shows what is missing in between. The output of former attempts is kept too.

        Raises:
            UnknownTrialError: the job has no such attempt.
        """
        self._write(logs.add_output, lease, lines, progress)

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
        return self._read(logs.logs, job_id, trial_number, after, limit, attempt, rank)

    def log_news(self, sequences: Mapping[tuple[str, int], int], limit: int = 1000) -> dict[tuple[str, int], LogNews]:
        """Return new output of trials. `sequences`: (job, trial) -> sequence of the last known part. Omits unknown trials."""
        return self._read(logs.log_news, sequences, limit)

    def progress(self, job_ids: Collection[str]) -> dict[str, list[ProgressRecord]]:
        """Return the last progress of each running attempt of these jobs, by trial."""
        return self._read(logs.progress, job_ids)

    # events

    def add_event(self, lease: Lease, kind: str, payload: Mapping[str, Any]) -> EventRecord:
        """Add an event that no other method writes."""
        return self._write(events.add_event, lease, kind, payload)

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[EventRecord]:
        """Return events of a job with a sequence above `after`, in order."""
        return self._read(events.events, job_id, after, limit)

    def news(self, sequences: Mapping[str, int], limit: int = 1000) -> dict[str, JobNews]:
        """Return the news of the existing jobs. `sequences`: job -> sequence of its last known event.

        All news are from one moment, with at most `limit` events for each job.
        """
        return self._read(events.news, sequences, limit)

    def figures(self) -> Figures:
        """Return counts over all jobs. Does not wait for an unavailable database."""
        return self._database.read_now(lambda session: figures.figures(session, self._now(session)))

    def revision(self) -> str:
        """Read the revision of the tables. Does not wait for an unavailable database."""
        return self._database.read_now(lambda session: stored_revision(session.connection()) or "")

    def check_writable(self) -> None:
        """Check, without waiting, that the database can be written.

        Raises:
            DatabaseUnavailableError: the disk is full, or nearly, or the database is unavailable.
        """
        self._database.check_writable()

    # API keys

    def create_key(self, owner: str, scopes: Collection[str], expires: datetime | None = None) -> tuple[ApiKey, str]:
        """Create a key; return it and its text, which cannot be retrieved again."""
        return self._write(keys.create_key, owner, scopes, expires, self._actor)

    def authenticate(self, text: str) -> ApiKey | None:
        """Return the key with this text; None: it is invalid, revoked or expired. Does not wait for writers."""
        return self._read_at(keys.authenticate, text)

    def note_key_use(self, key: ApiKey) -> None:
        """Record the use of the key, to the minute."""
        if keys.needs_use_update(key, datetime.now(UTC) if self._clock is None else self._clock()):
            self._write(keys.note_use, key.id)

    def revoke_key(self, key_id: str) -> ApiKey:
        """Revoke a key.

        Raises:
            UnknownKeyError: the key does not exist.
        """
        return self._write(keys.revoke_key, key_id, self._actor)

    def keys(self) -> list[ApiKey]:
        """All keys, oldest first."""
        return self._read(keys.keys)

    # the audit log

    def audit(
        self,
        limit: int = 1000,
        before: str | None = None,
        since: datetime | None = None,
        actor: str | None = None,
        action: str | None = None,
    ) -> list[AuditRecord]:
        """Return audit entries, newest first: before the entry with id `before`, since `since`, of one actor, of one action."""
        return self._read(audit.entries, limit, before, since, actor, action)

    # quotas

    def limits(self, owner: str, defaults: Quotas) -> Quotas:
        """Return the limits of an owner: their own ones if set, else the defaults."""
        return self._read(quotas.effective, [owner], defaults)[owner]

    def quotas(self, owner: str, defaults: Quotas) -> list[QuotaUse]:
        """Return limits and use of an owner. The use of streams is always 0, because the store does not know it."""
        return self._read_at(quotas.uses, owner, defaults)

    def set_quota(self, owner: str, quota: Quota, most: float | None) -> None:
        """Set an owner's limit, `math.inf` for no limit; None: restore the default."""
        self._write(quotas.set_quota, owner, quota, most, self._actor)

    def owners(self) -> list[str]:
        """Return all owners with a key or their own limits."""
        return self._read(quotas.owners)

    # workers

    def beat(self, worker: WorkerRecord) -> None:
        """Record a worker's heartbeat and state. The store sets its times."""
        self._write(workers.beat, worker)

    def retire(self, worker_id: str) -> None:
        """Remove a worker, if it is known."""
        self._write(workers.retire, worker_id)

    def workers(self, seconds: float = 60.0) -> list[WorkerRecord]:
        """Return the workers with a heartbeat within the last `seconds`."""
        return self._read_at(workers.workers, seconds)

    def usage(self, submitter: str) -> Usage:
        """Return the usage of a submitter's jobs today (UTC)."""
        return self._read_at(workers.usage, submitter)

    # webhooks

    def create_webhook(self, owner: str, url: str) -> Webhook:
        """Notify `url` when jobs of `owner` end. The caller must check that the address is allowed.

        Raises:
            QuotaExceededError: the owner has used up their webhooks.
            SecretError: its secret cannot be encrypted.
        """
        return self._write(webhooks.create_webhook, owner, url, self._secret_box, self._actor)

    def signing_secret(self, webhook: Webhook) -> str:
        """Return the secret that signs the deliveries of a webhook.

        Raises:
            SecretError: no key decrypts it.
        """
        return self._secret_box.open(webhook.secret)

    def webhooks(self, owner: str | None = None) -> list[Webhook]:
        """Return the webhooks of an owner, oldest first; None: of all owners."""
        return self._read(webhooks.webhooks, owner)

    def delete_webhook(self, webhook_id: str) -> None:
        """Remove a webhook and its log.

        Raises:
            UnknownWebhookError: the webhook does not exist.
        """
        self._write(webhooks.delete_webhook, webhook_id, self._actor)

    def claim_deliveries(
        self, limit: int = 10, seconds: float = 60.0, most: int | None = None, running: Mapping[str, int] | None = None
    ) -> list[Delivery]:
        """Claim due deliveries for this caller for `seconds`. A delivery that is not finished by then is due again.

        Owners take turns. With `most`, an owner has at most that many at a time, including the `running` ones.
        """
        # Called every second: checking first avoids a write transaction.
        return (
            self._write(webhooks.claim_deliveries, limit, seconds, most, running or {})
            if self._read_at(webhooks.some_due)
            else []
        )

    def postpone_deliveries(self, webhook_id: str, wait: float) -> int:
        """Postpone the deliveries of a webhook by at least `wait` seconds; return how many were postponed."""
        return self._write(webhooks.postpone_deliveries, webhook_id, wait)

    def finish_delivery(self, delivery_id: str, tried: DeliveryTry | None, state: DeliveryState, wait: float = 0.0) -> None:
        """Record a try (None: there was no try) and the state; a delivery that stays PENDING is due after `wait` seconds."""
        self._write(webhooks.finish_delivery, delivery_id, tried, state, wait)

    def deliveries(self, webhook_id: str, limit: int = 50) -> list[Delivery]:
        """Return the deliveries of a webhook, newest first."""
        return self._read(webhooks.deliveries, webhook_id, limit)

    # calibrations

    def save_calibration(
        self, fingerprint: str, cluster: ClusterSpec, result: MicrobenchmarkResult, seconds: float
    ) -> CalibrationRecord:
        """Store the result of a micro-benchmark; `fingerprint` identifies the hardware, in at most 16 characters."""
        return self._write(calibrations.save_calibration, fingerprint, cluster, result, seconds)

    def calibrations(self, fingerprint: str | None = None, limit: int = 50) -> list[CalibrationRecord]:
        """Return micro-benchmarks, newest first, of one fingerprint or of all."""
        return self._read(calibrations.calibrations, fingerprint, limit)

    # nodes

    def quarantine_node(self, lease: Lease, node: str, reason: str, seconds: float) -> QuarantineRecord:
        """Put a node in quarantine for `seconds`, so that all jobs avoid it, and write an event of the lease's job.

        A node that is already in quarantine gets the new reason and time.
        """
        return self._write(quarantine.quarantine_node, lease, node, reason, seconds)

    def quarantined_nodes(self) -> list[QuarantineRecord]:
        """Return the nodes that are in quarantine now, by name."""
        return self._read_at(quarantine.quarantined_nodes)

    def release_node(self, node: str) -> bool:
        """End the quarantine of a node; return whether it was in quarantine."""
        return self._write(quarantine.release_node, node, self._actor)

    # files

    def dump(self, sink: TextIO, job_id: str | None = None) -> int:
        """Write a job, or with None everything, as JSON Lines (storage.transfer) from one snapshot; return the count of rows.

        `sink` is truncated first; it must be seekable.

        Raises:
            UnknownJobError: the job does not exist.
        """
        count = self._read_at(transfer.dump, sink, job_id)
        self._audit("db.backup" if job_id is None else "db.export", job_id or "", {"rows": count})
        return count

    def load_job(self, source: TextIO, submitter: str = "") -> str:
        """Import a job's file that `dump` wrote, atomically; return the job's id.

        The job then belongs to `submitter`, and is PAUSED if it had not ended.

        Raises:
            TransferError: the file is invalid, truncated or of another version, or has rows that exist here or of another job.
        """
        return self._write(transfer.load_job, source, submitter, self._actor)

    def load(self, source: TextIO) -> list[str]:
        """Restore a backup that `dump` wrote, atomically; return the ids of the jobs.

        Jobs that were running continue as after a crash of their processes.

        Raises:
            TransferError: the file is invalid, truncated or of another version, or the database has jobs already.
        """
        return self._write(transfer.load, source, self._actor)

    def damages(self) -> list[Damage]:
        """Return all rows that cannot be read. Such a row only fails methods about its own job."""
        return self._read(lambda session: list(damage.damages(session)))

    def prune(self, before: datetime) -> Pruned:
        """Remove events and output of jobs that ended before, submission keys, finished deliveries, replaced calibrations."""
        # Audit first, so that rows removed before a crash are recorded too.
        self._audit("db.prune", "", {"before": before.isoformat()})
        of_jobs = [self._write(retention.prune_job, job_id, before) for job_id in self._read(retention.old_jobs, before)]
        return Pruned(
            events=sum(events for events, _ in of_jobs),
            logs=sum(parts for _, parts in of_jobs),
            deliveries=self._write(retention.prune_deliveries, before),
            submissions=self._write(retention.prune_submissions, before),
            calibrations=self._write(calibrations.prune_calibrations, before),
        )

    def close(self) -> None:
        """Close every connection. May be called twice."""
        self._database.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _audit(self, action: str, target: str, detail: Mapping[str, Any]) -> None:
        """Record an action that has no write transaction of its own in the audit log."""
        self._write(audit.record, self._actor, action, target, detail)

    def _read(self, work: Callable[Concatenate[Session, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._database.read(lambda session: work(session, *args, **kwargs))

    def _read_at(self, work: Callable[Concatenate[Session, datetime, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Read, passing the current time to `work`."""
        return self._database.read(lambda session: work(session, self._now(session), *args, **kwargs))

    def _write(self, work: Callable[Concatenate[Session, datetime, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        # Read the time inside the transaction: SQLite's writers then hold the lock, so events are ordered by time.
        return self._database.write(lambda session: work(session, self._now(session), *args, **kwargs))

    def _now(self, session: Session) -> datetime:
        return self._database.now(session) if self._clock is None else self._clock()
