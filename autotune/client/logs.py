"""What trials print and do while they run."""

from collections.abc import Iterator

from autotune.client.events import follow_events, follow_parts, known_parts
from autotune.client.jobs import job_path
from autotune.client.transport import Transport
from autotune.wire.events import Event, LogPart, Progress, ProgressList
from autotune.wire.jobs import JobSummary
from autotune.wire.trials import Trial


class LogCalls:
    """Calls about what runs. A job is given by its whole id, or as a `Job`; a trial by its number, or as a `Trial`."""

    _transport: Transport
    _outage_seconds: float

    def progress(self, job: str | JobSummary) -> tuple[Progress, ...]:
        """What each running attempt did when it was heard last."""
        return self._transport.get(ProgressList, f"{job_path(job)}/progress").items

    def live(self, job: str | JobSummary, after: int = 0) -> Iterator[Event | Progress]:
        """As `events` and, as it is heard, what running attempts do, about once a second for each."""
        return follow_events(self._transport, f"{job_path(job)}/events", after, self._outage_seconds, progress=True)

    def logs(
        self,
        job: str | JobSummary,
        trial: int | Trial,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        after: int = 0,
        follow: bool = False,
    ) -> Iterator[LogPart]:
        """What the ranks of a trial printed, in parts: the beginning and the end of each attempt.

        Args:
            job: the job.
            trial: the trial.
            attempt: one attempt's alone; None: that of all, one after the other.
            rank: one rank's alone; None: that of all.
            after: sequence of the last part that is known already.
            follow: whether to wait for further parts, over all attempts, until the trial has its outcome or the job has ended.
                A connection that breaks and a service that restarts are waited for, for up to `outage_seconds`.

        Raises:
            NotFoundError: there is no such job, or no such trial.
            UnreachableError, UnavailableError: the service was away for too long.
        """
        path = _path(job, trial)
        if not follow:
            of = {"attempt": attempt, "rank": rank}
            return known_parts(self._transport, path, after, {name: value for name, value in of.items() if value is not None})
        parts = follow_parts(self._transport, path, after, self._outage_seconds)
        return (part for part in parts if attempt in (None, part.attempt) and rank in (None, part.rank))

    def log_text(
        self,
        job: str | JobSummary,
        trial: int | Trial,
        *,
        attempt: int | None = None,
        rank: int | None = None,
        tail: int | None = None,
    ) -> str:
        """What the ranks of a trial printed, as lines; each begins with its rank where there are several.

        Args:
            job: the job.
            trial: the trial.
            attempt: one attempt's alone; None: that of all.
            rank: one rank's alone; None: that of all.
            tail: the last lines alone; None: all that are kept.

        Raises:
            NotFoundError: there is no such job, or no such trial.
        """
        given = {"attempt": attempt, "rank": rank, "tail": tail}
        params = {name: value for name, value in given.items() if value is not None}
        return self._transport.send("GET", f"{_path(job, trial)}/text", params=params).content.decode()


def _path(job: str | JobSummary, trial: int | Trial) -> str:
    return f"{job_path(job)}/trials/{trial.number if isinstance(trial, Trial) else int(trial)}/logs"
