"""The contract of a store."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from search_spaces.outcome import JobState, Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.records import AttemptRecord, EventRecord, JobRecord, Lease, Owner, TrialRecord


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

    # jobs

    @abstractmethod
    def create_job(self, request: Mapping[str, Any]) -> JobRecord:
        """Open a job in state QUEUED."""

    @abstractmethod
    def job(self, job_id: str | None = None) -> JobRecord:
        """Return a job by its id, or by a prefix of it that only one job has; None: the one created last.

        Raises:
            UnknownJobError: there is none, or the prefix fits several.
        """

    @abstractmethod
    def jobs(self, limit: int = 50, before: str | None = None) -> list[JobRecord]:
        """The newest jobs first; `before` is the id of the last job of the previous page."""

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
    def heartbeat(self, lease: Lease, seconds: float = 30.0) -> Lease:
        """Extend the lease and add the time since the last heartbeat to the job's active seconds."""

    @abstractmethod
    def release(self, lease: Lease, state: JobState, reason: str, message: str) -> JobRecord:
        """Give the job back in `state`. Attempts that still run become `abandoned`."""

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

    # events

    @abstractmethod
    def add_event(self, lease: Lease, kind: str, payload: Mapping[str, Any]) -> EventRecord:
        """Add an event that no other method writes."""

    @abstractmethod
    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[EventRecord]:
        """Events of a job with a sequence above `after`, in order."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection. May be called twice."""

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
