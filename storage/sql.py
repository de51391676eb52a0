"""The store on SQL: SQLite in one file, or PostgreSQL."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
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
    results,
    retention,
    transfer,
    trials,
    webhooks,
    workers,
)
from storage.address import check_file, default_database_url, describe, parse_address
from storage.codec import job_record
from storage.database import OUTAGE_SECONDS, Database
from storage.errors import QuotaExceededError, SubmissionConflictError
from storage.log_records import LogNews, LogRecord, ProgressRecord
from storage.migrations import migrate, stored_revision
from storage.private_files import make_private_file
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
from storage.store import Store

__all__ = ["SqlStore", "default_database_url", "open_store"]

P = ParamSpec("P")
T = TypeVar("T")


def open_store(url: str, busy_seconds: float = 5.0) -> Store:
    """Open the store at `url`, create or migrate it if needed, and check that it can be written.

    Args:
        url: path of an SQLite file, `sqlite:///PATH`, or `postgresql://…`.
        busy_seconds: how long each transaction waits for another process's lock.

    Raises:
        DatabaseUnavailableError: it cannot be opened or written, is locked, or has a newer schema.
    """
    return SqlStore(url, busy_seconds)


class SqlStore(Store):
    """A store on SQL. Each method runs one function of the module for its topic in one transaction."""

    def __init__(
        self,
        url: str,
        busy_seconds: float = 5.0,
        clock: Callable[[], datetime] | None = None,
        outage_seconds: float = OUTAGE_SECONDS,
    ) -> None:
        """Open the database; see `open_store`. `clock` returns the time in UTC; None: the database's clock."""
        address = parse_address(url)
        place = describe(address)
        if address.get_backend_name() == "sqlite":
            check_file(Path(place))
            make_private_file(Path(place))  # SQLite creates its journals with the mode of the file
        self._clock = clock
        self._database = Database(address, busy_seconds, outage_seconds)
        self._secret_box = SecretBox(address)
        self._actor = audit.local_actor()
        try:
            self._database.migrate(lambda session: migrate(session.connection(), place))
            # Encrypt old plain-text secrets, unless only this machine has the key: other machines could not decrypt them.
            if self._secret_box.is_shared and self._read(webhooks.some_plain):
                self._write(webhooks.seal_all, self._secret_box)
        except BaseException:
            self._database.close()
            raise

    def by(self, actor: Actor) -> "SqlStore":
        other = copy.copy(self)
        other._actor = actor
        return other

    def create_job(self, request: Mapping[str, Any]) -> JobRecord:
        return self._write(jobs.create_job, request, self._actor)

    def job(self, job_id: str | None = None) -> JobRecord:
        return self._database.read(lambda session: job_record(jobs.find_job(session, job_id)))

    def exact_jobs(self, job_ids: Collection[str]) -> dict[str, JobRecord]:
        return self._read(jobs.exact_jobs, job_ids)

    def jobs(
        self,
        limit: int = 50,
        before: str | None = None,
        states: Collection[JobState] = (),
        submitter: str | None = None,
        tags: Collection[str] = (),
    ) -> list[JobRecord]:
        return self._read(jobs.jobs, limit, before, states, submitter, tags)

    def job_summaries(
        self,
        limit: int = 50,
        before: str | None = None,
        states: Collection[JobState] = (),
        submitter: str | None = None,
        tags: Collection[str] = (),
    ) -> list[JobRecord]:
        return self._read(jobs.job_summaries, limit, before, states, submitter, tags)

    def submit_all(
        self, submissions: Sequence[tuple[Mapping[str, Any], Submission]]
    ) -> list[tuple[JobRecord, bool] | SubmissionConflictError | QuotaExceededError]:
        return self._write(queue.submit_all, submissions, self._actor)

    def ask(self, job_id: str, wanted: Ask, budget: Mapping[str, Any] | None = None, for_worker: bool = True) -> JobRecord:
        return self._write(queue.ask, job_id, wanted, budget or {}, for_worker, self._actor)

    def change_request(self, job_id: str, version: int | None, changes: Mapping[str, Any]) -> JobRecord:
        return self._write(queue.change_request, job_id, version, changes, self._actor)

    def delete_job(self, job_id: str) -> None:
        self._write(jobs.delete_job, job_id, self._actor)

    def acquire(self, job_id: str, owner: Owner, seconds: float = 30.0) -> Lease:
        return self._write(jobs.acquire, job_id, owner, seconds)

    def claim(self, owner: Owner, seconds: float = 30.0, limits: QueueLimits | None = None) -> Lease | None:
        return self._write(queue.claim, owner, seconds, limits or QueueLimits())

    def heartbeat(self, lease: Lease, seconds: float = 30.0) -> Lease:
        return self._write(jobs.heartbeat, lease, seconds)

    def release(
        self, lease: Lease, state: JobState, reason: str, message: str, request: Mapping[str, Any] | None = None
    ) -> JobRecord:
        return self._write(jobs.release, lease, state, reason, message, request)

    def add_trial(
        self,
        lease: Lease,
        config: TrialConfig,
        purpose: Purpose,
        fidelity: str = "full",
        repeat: int = 0,
        refusal: TrialResult | None = None,
    ) -> TrialRecord:
        return self._write(trials.add_trial, lease, config, purpose, fidelity, repeat, refusal)

    def trials(self, job_id: str) -> list[TrialRecord]:
        return self._read(trials.trials, job_id)

    def figures_of(self, job_id: str, first: int = 0, limit: int | None = None) -> list[TrialRecord]:
        return self._read(trials.figures_of, job_id, first, limit)

    def overviews(self, job_ids: Collection[str]) -> dict[str, Overview]:
        return self._read(overviews.overviews, job_ids)

    def placements(self, job_id: str, first: int = 0) -> dict[int, Placement]:
        return self._read(attempts.placements, job_id, first)

    def trial_page(self, job_id: str, first: int = 0, limit: int = 1000) -> list[TrialRecord]:
        return self._read(trials.trials, job_id, first, limit)

    def plain_trials(self, job_id: str, first: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return self._read(trials.plain_trials, job_id, first, limit)

    def start_attempt(self, lease: Lease, trial_number: int) -> AttemptRecord:
        return self._write(attempts.start_attempt, lease, trial_number)

    def finish_attempt(self, lease: Lease, result: TrialResult, retry: bool = False) -> bool:
        prepared = results.prepare(result)
        try:
            return self._write(results.finish_running, lease, prepared, retry)
        except results.NotRunningError:
            return self._write(attempts.finish_attempt, lease, result, retry)

    def attempts(self, job_id: str, trial_number: int | None = None) -> list[AttemptRecord]:
        return self._read(attempts.attempts, job_id, trial_number)

    def set_answer(self, lease: Lease, answer: Mapping[str, Any] | None) -> None:
        self._write(jobs.set_answer, lease, None if answer is None else dict(answer))

    def set_reference_losses(self, lease: Lease, losses: Sequence[float]) -> None:
        self._write(jobs.set_reference_losses, lease, losses)

    def set_prior(self, lease: Lease, prior: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._write(priors.set_prior, lease, prior)

    def prior(self, job_id: str) -> Mapping[str, Any] | None:
        return self._read(priors.prior, job_id)

    def add_output(self, lease: Lease, lines: Sequence[LogLines], progress: Sequence[Progress] = ()) -> None:
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
        return self._read(logs.logs, job_id, trial_number, after, limit, attempt, rank)

    def log_news(self, known: Mapping[tuple[str, int], int], limit: int = 1000) -> dict[tuple[str, int], LogNews]:
        return self._read(logs.log_news, known, limit)

    def progress(self, job_ids: Collection[str]) -> dict[str, list[ProgressRecord]]:
        return self._read(logs.progress, job_ids)

    def add_event(self, lease: Lease, kind: str, payload: Mapping[str, Any]) -> EventRecord:
        return self._write(events.add_event, lease, kind, payload)

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[EventRecord]:
        return self._read(events.events, job_id, after, limit)

    def news(self, known: Mapping[str, int], limit: int = 1000) -> dict[str, JobNews]:
        return self._read(events.news, known, limit)

    def figures(self) -> Figures:
        return self._database.read_now(lambda session: figures.figures(session, self._now(session)))

    def revision(self) -> str:
        return self._database.read_now(lambda session: stored_revision(session.connection()) or "")

    def check_writable(self) -> None:
        self._database.check_writable()

    def create_key(self, owner: str, scopes: Collection[str], expires: datetime | None = None) -> tuple[ApiKey, str]:
        return self._write(keys.create_key, owner, scopes, expires, self._actor)

    def authenticate(self, text: str) -> ApiKey | None:
        return self._read_at(keys.authenticate, text)

    def note_key_use(self, key: ApiKey) -> None:
        if keys.needs_use_update(key, datetime.now(UTC) if self._clock is None else self._clock()):
            self._write(keys.note_use, key.id)

    def revoke_key(self, key_id: str) -> ApiKey:
        return self._write(keys.revoke_key, key_id, self._actor)

    def keys(self) -> list[ApiKey]:
        return self._read(keys.keys)

    def audit(
        self,
        limit: int = 1000,
        before: str | None = None,
        since: datetime | None = None,
        actor: str | None = None,
        action: str | None = None,
    ) -> list[AuditRecord]:
        return self._read(audit.entries, limit, before, since, actor, action)

    def limits(self, owner: str, defaults: Quotas) -> Quotas:
        return self._read(quotas.effective, [owner], defaults)[owner]

    def quotas(self, owner: str, defaults: Quotas) -> list[QuotaUse]:
        return self._read_at(quotas.uses, owner, defaults)

    def set_quota(self, owner: str, quota: Quota, most: float | None) -> None:
        self._write(quotas.set_quota, owner, quota, most, self._actor)

    def owners(self) -> list[str]:
        return self._read(quotas.owners)

    def beat(self, worker: WorkerRecord) -> None:
        self._write(workers.beat, worker)

    def retire(self, worker_id: str) -> None:
        self._write(workers.retire, worker_id)

    def workers(self, seconds: float = 60.0) -> list[WorkerRecord]:
        return self._read_at(workers.workers, seconds)

    def usage(self, submitter: str) -> Usage:
        return self._read_at(workers.usage, submitter)

    def create_webhook(self, owner: str, url: str) -> Webhook:
        return self._write(webhooks.create_webhook, owner, url, self._secret_box, self._actor)

    def signing_secret(self, webhook: Webhook) -> str:
        return self._secret_box.open(webhook.secret)

    def webhooks(self, owner: str | None = None) -> list[Webhook]:
        return self._read(webhooks.webhooks, owner)

    def delete_webhook(self, webhook_id: str) -> None:
        self._write(webhooks.delete_webhook, webhook_id, self._actor)

    def claim_deliveries(
        self, limit: int = 10, seconds: float = 60.0, most: int | None = None, running: Mapping[str, int] | None = None
    ) -> list[Delivery]:
        # Called every second: checking first avoids a write transaction.
        return (
            self._write(webhooks.claim_deliveries, limit, seconds, most, running or {})
            if self._read_at(webhooks.some_due)
            else []
        )

    def postpone_deliveries(self, webhook_id: str, wait: float) -> int:
        return self._write(webhooks.postpone_deliveries, webhook_id, wait)

    def finish_delivery(self, delivery_id: str, tried: DeliveryTry | None, state: DeliveryState, wait: float = 0.0) -> None:
        self._write(webhooks.finish_delivery, delivery_id, tried, state, wait)

    def deliveries(self, webhook_id: str, limit: int = 50) -> list[Delivery]:
        return self._read(webhooks.deliveries, webhook_id, limit)

    def save_calibration(
        self, fingerprint: str, cluster: ClusterSpec, result: MicrobenchmarkResult, seconds: float
    ) -> CalibrationRecord:
        return self._write(calibrations.save_calibration, fingerprint, cluster, result, seconds)

    def calibrations(self, fingerprint: str | None = None, limit: int = 50) -> list[CalibrationRecord]:
        return self._read(calibrations.calibrations, fingerprint, limit)

    def quarantine_node(self, lease: Lease, node: str, reason: str, seconds: float) -> QuarantineRecord:
        return self._write(quarantine.quarantine_node, lease, node, reason, seconds)

    def quarantined_nodes(self) -> list[QuarantineRecord]:
        return self._read_at(quarantine.quarantined_nodes)

    def release_node(self, node: str) -> bool:
        return self._write(quarantine.release_node, node, self._actor)

    def dump(self, sink: TextIO, job_id: str | None = None) -> int:
        count = self._read_at(transfer.dump, sink, job_id)
        self._audit("db.backup" if job_id is None else "db.export", job_id or "", {"rows": count})
        return count

    def load_job(self, source: TextIO, submitter: str = "") -> str:
        return self._write(transfer.load_job, source, submitter, self._actor)

    def damages(self) -> list[Damage]:
        return self._read(lambda session: list(damage.damages(session)))

    def load(self, source: TextIO) -> list[str]:
        return self._write(transfer.load, source, self._secret_box, self._actor)

    def prune(self, before: datetime) -> Pruned:
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
        self._database.close()

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
