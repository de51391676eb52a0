"""Where jobs are submitted and looked at: a service or a database, the same to the commands."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from autotune.explain.explanation.findings import Explanation
from autotune.exports.export import Export
from search_spaces.outcome import JobState
from search_spaces.trial import Interval
from storage.log_records import LogRecord, ProgressRecord
from storage.records import Ask, EventRecord, JobRecord, TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a job is."""

    searched: int
    """Search trials that started and have an outcome."""
    gain: Interval | None
    """The answer over the baseline; None: one of them was not measured."""
    keeps_baseline: bool
    """Whether the answer is to keep the baseline."""


def standing_of(job: JobRecord, searched: int) -> Standing:
    """How far a job is, by its row and the number of search trials that ran."""
    answer = job.answer or {}
    gain = answer.get("gain")
    known = None if gain is None else Interval(mean=gain["mean"], low=gain["low"], high=gain["high"])
    return Standing(searched=searched, gain=known, keeps_baseline=bool(answer.get("keeps_baseline")))


class JobBackend(ABC):
    """Jobs, wherever they are kept.

    - A job is named by its id, or by a beginning of it that no other job has; None or LATEST: the one opened last.
    - A service leaves out of a record what is its own affair: the job's holder, reference losses, what its request resolved to.

    Raises:
        LookupError: there is no such job.
        ValueError: a field is refused, or what is asked does not fit the state that the job is in.
        NoBestError, UnknownFormatError: of the best configuration and its exports.
        OSError: the service, or the database, cannot be reached or used.
    """

    words: tuple[str, ...] = ()
    """Options with which another command finds the same jobs."""
    runs_jobs = False
    """Whether `autotune sweep --resume` on this machine can run a job of this place."""

    @abstractmethod
    def submit(self, fields: Mapping[str, Any], priority: int) -> JobRecord:
        """Submit a job with these fields of a request. Files are read here; the job needs none of them afterwards."""

    @abstractmethod
    def job(self, job: str | None) -> JobRecord:
        """The job as it is now."""

    @abstractmethod
    def jobs(
        self, states: Collection[JobState], submitter: str | None, limit: int, tags: Collection[str] = ()
    ) -> Iterator[JobRecord]:
        """The newest jobs first, in one of the states (none given: in any) and with all of the tags; `submitter` None: of every
        submitter whom one may see."""

    @abstractmethod
    def standings(self, jobs: Sequence[JobRecord]) -> list[Standing]:
        """How far each of these jobs is."""

    @abstractmethod
    def ask(self, job: str, wanted: Ask, budget: Mapping[str, Any] | None = None) -> JobRecord:
        """Ask for a change; what is done already changes nothing. `budget`: with RESUME, trials or seconds in all."""

    @abstractmethod
    def label(self, job: str, labels: Mapping[str, Any]) -> JobRecord:
        """Change the job's name, tags or note."""

    @abstractmethod
    def clone(self, job: str) -> JobRecord:
        """Submit the job's request once more."""

    @abstractmethod
    def extend(self, job: str, trials: int | None, max_seconds: float | None) -> JobRecord:
        """Set the budget of a job that has not ended."""

    @abstractmethod
    def trials(self, job: str | None, first: int = 0) -> Iterator[TrialRecord]:
        """The trials that there are, by number from `first` on."""

    @abstractmethod
    def events(self, job: str | None, after: int = 0) -> Iterator[EventRecord]:
        """Events beyond `after`, each once and in order, until the job has ended."""

    @abstractmethod
    def live(self, job: str | None) -> Iterator[EventRecord | ProgressRecord]:
        """Events from the first on and, as it is heard, what running attempts do, until the job has ended."""

    @abstractmethod
    def progress(self, job: str | None) -> list[ProgressRecord]:
        """What each running attempt did when it was heard last."""

    @abstractmethod
    def logs(self, job: str | None, trial: int, attempt: int | None = None, rank: int | None = None) -> Iterator[LogRecord]:
        """What the ranks of a trial, or one of them, printed so far, in one attempt or in all; nothing, of an unknown trial."""

    @abstractmethod
    def follow_logs(
        self, job: str | None, trial: int, after: int, attempt: int | None = None, rank: int | None = None
    ) -> Iterator[LogRecord]:
        """The same beyond the part `after`, as it comes, until the trial has its outcome or the job has ended."""

    @abstractmethod
    def best(self, job: str | None) -> dict[str, Any]:
        """The best-config document."""

    @abstractmethod
    def export(self, job: str | None, format_name: str) -> Export:
        """The best configuration as the file of a framework."""

    @abstractmethod
    def explain(self, job: str | None) -> Explanation:
        """Why the best configuration is the best."""

    @abstractmethod
    def report(self, job: str | None, format_name: str) -> str:
        """The job as one file: `html` or `md`."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection."""

    def __enter__(self) -> "JobBackend":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
