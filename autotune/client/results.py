"""What a job has found: trials, attempts, the best, exports, events."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from autotune.client.events import follow_events, known_events
from autotune.client.jobs import PAGE, job_path
from autotune.client.transport import HttpTransport, one_line
from autotune.wire.figures import Differences, Figure, StepParts
from autotune.wire.jobs import JobSummary
from autotune.wire.service import Names
from autotune.wire.trials import Attempt, AttemptList, Points, Trial, TrialPage
from search_spaces.shared_records import JobEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The best configuration as a framework's file."""

    text: str
    """Content of the file."""
    note: str
    """What the format cannot express. Empty: the file expresses everything."""


class ResultCalls:
    """Calls about what a job has found. A job is given by its whole id, or as a `Job`."""

    _transport: HttpTransport
    _outage_seconds: float

    def trials(self, job: str | JobSummary, *, first: int = 0) -> Iterator[Trial]:
        """The trials that there are now, by number from `first` on, refused ones included."""
        cursor: int | None = first
        while cursor is not None:
            page = self._transport.get(TrialPage, f"{job_path(job)}/trials", {"cursor": cursor, "limit": PAGE})
            yield from page.items
            cursor = page.next

    def attempts(self, job: str | JobSummary, trial: int | Trial) -> tuple[Attempt, ...]:
        """The attempts of a trial, oldest first, superseded ones included."""
        number = trial.number if isinstance(trial, Trial) else int(trial)
        return self._transport.get(AttemptList, f"{job_path(job)}/trials/{number}/attempts").items

    def points(self, job: str | JobSummary, since: int = 0) -> Points:
        """The job's trials as columns, for plots: all of them, or those that changed.

        Args:
            job: the job.
            since: the `version` of an earlier answer; 0: every trial.
        """
        return self._transport.get(Points, f"{job_path(job)}/points", {"since": since})

    def figures(self, job: str | JobSummary) -> tuple[str, ...]:
        """Names of the figures that there are of a job."""
        return self._transport.get(Names, f"{job_path(job)}/figures").items

    def figure(self, job: str | JobSummary, name: str) -> Figure:
        """A figure as plain data; what there is nothing for says so in its summary.

        Raises:
            InvalidRequestError: there is none of that name.
        """
        return self._transport.get(Figure, f"{job_path(job)}/figures/{quote(name, safe='')}")

    def step_parts(self, job: str | JobSummary, trial: int | Trial) -> StepParts:
        """Where a trial's measured step goes, by the equations."""
        number = trial.number if isinstance(trial, Trial) else int(trial)
        return self._transport.get(StepParts, f"{job_path(job)}/trials/{number}/parts")

    def differences(self, job: str | JobSummary, trial: int | Trial, other: int | Trial) -> Differences:
        """The knobs in which trial `other` differs from `trial`, with the predicted effect of each on speed and memory.

        Raises:
            NotFoundError: there is no such trial.
        """
        number, second = (item.number if isinstance(item, Trial) else int(item) for item in (trial, other))
        return self._transport.get(Differences, f"{job_path(job)}/trials/{number}/differences", {"other": second})

    def best(self, job: str | JobSummary) -> dict[str, Any]:
        """The best configuration so far: the document that docs/best-config.md explains.

        Raises:
            NotFoundError: nothing may win yet.
        """
        document: dict[str, Any] = self._transport.send("GET", f"{job_path(job)}/best").json()
        return document

    def export(self, job: str | JobSummary, format: str = "json") -> Export:
        """The best configuration as the file of a framework; docs/exports.md has the formats.

        Raises:
            NotFoundError: there is no such format, or nothing may win yet.
        """
        answer = self._transport.send("GET", f"{job_path(job)}/export", params={"format": format})
        return Export(text=answer.content.decode(), note=one_line(answer.headers.get("autotune-note", "")))

    def explanation(self, job: str | JobSummary) -> dict[str, Any]:
        """Why the best configuration is the best: the document of `autotune explain --json`.

        Raises:
            NotFoundError: nothing has won.
        """
        document: dict[str, Any] = self._transport.send("GET", f"{job_path(job)}/explanation").json()
        return document

    def report(self, job: str | JobSummary, format: str = "html") -> str:
        """The job as one file: `html`, which opens anywhere, or `md`.

        Raises:
            NotFoundError: there is no such format.
        """
        return self._transport.send("GET", f"{job_path(job)}/report", params={"format": format}).content.decode()

    def events(self, job: str | JobSummary, after: int = 0, follow: bool = True) -> Iterator[JobEvent]:
        """What happens to the job, each event once and in order, until it has ended.

        A connection that breaks and a service that restarts are waited for, for up to `outage_seconds`. A paused job has not
        ended: it may be resumed.

        Args:
            job: the job.
            after: sequence of the last event that is known already.
            follow: whether to wait for further events; else those alone are given that there are now.

        Raises:
            NotFoundError: there is no such job.
            UnreachableError, UnavailableError: the service was away for too long.
        """
        path = f"{job_path(job)}/events"
        if not follow:
            return known_events(self._transport, path, after)
        signs = follow_events(self._transport, path, after, self._outage_seconds)
        return (sign for sign in signs if isinstance(sign, JobEvent))
