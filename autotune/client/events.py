"""Streams: live events of a job, what its trials print and do, over broken connections and restarts of the service."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from autotune.client.errors import ServiceError, UnavailableError, UnreachableError
from autotune.client.jobs import job_path
from autotune.client.transport import HttpTransport, decode, one_line
from autotune.wire.jobs import EventPage, JobSummary, LogPage, ProgressList
from autotune.wire.trials import Trial
from search_spaces.shared_records import AttemptProgress, JobEvent, LogPart

PAUSE_SECONDS = 0.2
"""Before a stream is opened again; up to ten times as long while nothing answers."""

Messages = Iterator[tuple[str, str]]
"""Kind and data of each."""
T = TypeVar("T")
V = TypeVar("V", JobEvent, LogPart, AttemptProgress)


def known_events(transport: HttpTransport, path: str, after: int) -> Iterator[JobEvent]:
    """The events beyond `after` that there are now."""
    while items := (page := transport.get(EventPage, path, {"after": after})).items:
        yield from items
        after = page.next


def known_parts(transport: HttpTransport, path: str, after: int, of: Mapping[str, int]) -> Iterator[LogPart]:
    """The parts of a trial's output beyond `after` that there are now."""
    while items := (page := transport.get(LogPage, path, {"after": after, **of})).items:
        yield from items
        after = page.next


def follow_events(
    transport: HttpTransport, path: str, after: int, outage_seconds: float, progress: bool = False
) -> Iterator[JobEvent | AttemptProgress]:
    """Events beyond `after` until the job has ended and all were given; with `progress`, what running attempts do as well.

    1. Open a stream from the last event that is known. 204: the job has ended, and nothing is left.
    2. Give what comes, as long as each is the next one. One that is known already is left out; one that is not the next means
       that something was lost on the way.
    3. When the stream ends, breaks or falls silent, go to 1: the service gives whatever is missing. Only its first event being
       the wrong one cannot be mended so.

    Raises:
        ServiceError: the service refuses it, or has been away for longer than `outage_seconds`.
    """
    params = {"progress": "true"} if progress else {}
    return _followed(transport, f"{path}/stream", params, after, outage_seconds, _in_order)


def _followed(
    transport: HttpTransport,
    path: str,
    params: Mapping[str, str],
    after: int,
    outage_seconds: float,
    read: Callable[[Messages, int], Iterator[tuple[int, T]]],
) -> Iterator[T]:
    """What `read` makes of one stream after the other, with the number from which the next one is to begin."""
    lost, pause = time.monotonic(), PAUSE_SECONDS
    while True:
        opened = False
        try:
            with transport.stream(path, {"Last-Event-ID": str(after)}, params) as messages:
                if messages is None:
                    return
                opened = True
                for number, item in read(messages, after):
                    after = number
                    yield item
        except (UnreachableError, UnavailableError):
            if not opened and time.monotonic() - lost > outage_seconds:
                raise
        if opened:
            lost, pause = time.monotonic(), PAUSE_SECONDS
        time.sleep(pause)
        pause = min(2 * pause, 10 * PAUSE_SECONDS)


def _in_order(messages: Messages, after: int) -> Iterator[tuple[int, JobEvent | AttemptProgress]]:
    """The events beyond `after`, as far as they follow one upon the other."""
    yielded = 0
    for kind, data in messages:
        if kind == "progress":
            yield after + yielded, _decoded(AttemptProgress, data)
            continue
        event = _decoded(JobEvent, data)
        if event.sequence > after + 1 + yielded:
            if not yielded:
                raise ServiceError(f"events: {after + 1} is missing before {event.sequence}; ask who runs the service")
            return
        if event.sequence == after + 1 + yielded:
            yielded += 1
            yield event.sequence, event


def _later(messages: Messages, after: int) -> Iterator[tuple[int, LogPart]]:
    """The parts beyond `after`. Their numbers jump where parts were left out."""
    for _, data in messages:
        part = _decoded(LogPart, data)
        if part.sequence > after:
            after = part.sequence
            yield after, part


def _decoded(kind: type[V], data: str) -> V:
    try:
        return decode(kind, json.loads(data))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{one_line(data)[:100]!r} cannot be read ({error})"
        raise ServiceError(f"events: {problem}; use the client of the service's version") from error


class LogCalls:
    """Calls about what runs. A job is given by its whole id, or as a `Job`; a trial by its number, or as a `Trial`."""

    _transport: HttpTransport
    _outage_seconds: float

    def progress(self, job: str | JobSummary) -> tuple[AttemptProgress, ...]:
        """What each running attempt did when it was heard last."""
        return self._transport.get(ProgressList, f"{job_path(job)}/progress").items

    def live(self, job: str | JobSummary, after: int = 0) -> Iterator[JobEvent | AttemptProgress]:
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
        parts = _followed(self._transport, f"{path}/stream", {}, after, self._outage_seconds, _later)
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
        filters = {"attempt": attempt, "rank": rank, "tail": tail}
        params = {name: value for name, value in filters.items() if value is not None}
        return self._transport.send("GET", f"{_path(job, trial)}/text", params=params).content.decode()


def _path(job: str | JobSummary, trial: int | Trial) -> str:
    return f"{job_path(job)}/trials/{trial.number if isinstance(trial, Trial) else int(trial)}/logs"
