"""The interface of commands to jobs in a service or a database."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from autotune.errors import RequestError
from autotune.explain.findings import Explanation
from autotune.frameworks.export import Export
from search_spaces.shared_records import AttemptProgress, JobEvent, LogPart
from search_spaces.trial import Interval
from storage.records import Ask, JobFilter, JobRecord, TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """Progress of a job."""

    searched: int
    """Started search trials with an outcome."""
    gain: Interval | None
    """Gain of the answer relative to the baseline; None: one of them was not measured."""
    keeps_baseline: bool
    """Whether the answer is to keep the baseline."""
    waiting: str
    """Why a queued job has not started; empty: it is not queued."""


def standing_of(job: JobRecord, searched: int, waiting: str) -> JobProgress:
    """Progress of a job, from its row, the number of search trials that ran, and why it waits."""
    answer = job.answer or {}
    gain = answer.get("gain")
    interval = None if gain is None else Interval(mean=gain["mean"], low=gain["low"], high=gain["high"])
    return JobProgress(searched=searched, gain=interval, keeps_baseline=bool(answer.get("keeps_baseline")), waiting=waiting)


class JobBackend(ABC):
    """Access to jobs, wherever they are stored.

    - A job is identified by its id or a unique prefix; None or LATEST: the one opened last.
    - A service omits internal data from records: the job's holder, reference losses, the resolved request.

    Raises:
        LookupError: there is no such job.
        ValueError: a field is refused, or the operation does not fit the job's state.
        NoBestError, UnknownFormatError: there is no best configuration, or no such export.
        OSError: the service, or the database, cannot be reached or used.
    """

    words: tuple[str, ...] = ()
    """Options with which another command accesses the same jobs."""
    runs_jobs = False
    """Whether `autotune sweep --resume` on this machine can run its jobs."""

    @abstractmethod
    def submit(self, fields: Mapping[str, Any], priority: int) -> JobRecord:
        """Submit a job with these request fields. Files are read here; the job does not need them afterwards."""

    @abstractmethod
    def job(self, job: str | None) -> JobRecord:
        """The current state of the job."""

    @abstractmethod
    def jobs(self, having: JobFilter, limit: int) -> Iterator[JobRecord]:
        """Jobs, newest first; a `submitter` of None: of every visible submitter."""

    @abstractmethod
    def standings(self, jobs: Sequence[JobRecord]) -> list[JobProgress]:
        """Progress of each of these jobs."""

    @abstractmethod
    def ask(self, job: str, request: Ask, budget: Mapping[str, Any] | None = None) -> JobRecord:
        """Request a state change; idempotent. `budget`: with RESUME, total trials or seconds."""

    @abstractmethod
    def label(self, job: str, labels: Mapping[str, Any]) -> JobRecord:
        """Change the job's name, tags or note."""

    def share(self, job: str, days: int) -> str:  # noqa: ARG002
        """The address of a link that shows the job, made now; only a service has links."""
        raise RequestError("url", "is missing: links are those of a service", "give --url, or set AUTOTUNE_URL")

    @abstractmethod
    def clone(self, job: str) -> JobRecord:
        """Submit the job's request again."""

    @abstractmethod
    def extend(self, job: str, trials: int | None, max_seconds: float | None) -> JobRecord:
        """Set the budget of a job that has not ended."""

    @abstractmethod
    def trials(self, job: str | None, first: int = 0) -> Iterator[TrialRecord]:
        """The existing trials, by number from `first` on."""

    @abstractmethod
    def events(self, job: str | None, after: int = 0) -> Iterator[JobEvent]:
        """Events after `after`, each once and in order, until the job has ended."""

    @abstractmethod
    def live(self, job: str | None) -> Iterator[JobEvent | AttemptProgress]:
        """All events, and progress of running attempts as it arrives, until the job has ended."""

    @abstractmethod
    def progress(self, job: str | None) -> list[AttemptProgress]:
        """Last progress report of each running attempt."""

    @abstractmethod
    def logs(self, job: str | None, trial: int, attempt: int | None = None, rank: int | None = None) -> Iterator[LogPart]:
        """Output so far of all ranks of a trial or of one rank, in one or all attempts; empty for an unknown trial."""

    @abstractmethod
    def follow_logs(
        self, job: str | None, trial: int, after: int, attempt: int | None = None, rank: int | None = None
    ) -> Iterator[LogPart]:
        """Output after the part `after`, as it arrives, until the trial has an outcome or the job has ended."""

    @abstractmethod
    def best(self, job: str | None) -> dict[str, Any]:
        """The best-config document."""

    @abstractmethod
    def export(self, job: str | None, format_name: str) -> Export:
        """The best configuration as a framework's file."""

    @abstractmethod
    def explain(self, job: str | None) -> Explanation:
        """Explanation of why the best configuration is the best."""

    @abstractmethod
    def report(self, job: str | None, format_name: str) -> str:
        """Report of the job as one file: `html` or `md`."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection."""

    def __enter__(self) -> "JobBackend":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
