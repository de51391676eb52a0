"""Streams: live events of a job, and what a trial prints, over broken connections and restarts of the service."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from autotune.client.decoding import decode
from autotune.client.errors import ServiceError, UnavailableError, UnreachableError
from autotune.client.problems import one_line
from autotune.client.transport import Transport
from autotune.wire.events import Event, EventPage, LogPage, LogPart, Progress

PAUSE_SECONDS = 0.2
"""Before a stream is opened again; up to ten times as long while nothing answers."""

Messages = Iterator[tuple[str, str]]
"""Kind and data of each."""
T = TypeVar("T")
V = TypeVar("V", Event, LogPart, Progress)


def known_events(transport: Transport, path: str, after: int) -> Iterator[Event]:
    """The events beyond `after` that there are now."""
    while items := (page := transport.get(EventPage, path, {"after": after})).items:
        yield from items
        after = page.next


def known_parts(transport: Transport, path: str, after: int, of: Mapping[str, int]) -> Iterator[LogPart]:
    """The parts of a trial's output beyond `after` that there are now."""
    while items := (page := transport.get(LogPage, path, {"after": after, **of})).items:
        yield from items
        after = page.next


def follow_events(
    transport: Transport, path: str, after: int, outage_seconds: float, progress: bool = False
) -> Iterator[Event | Progress]:
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


def follow_parts(transport: Transport, path: str, after: int, outage_seconds: float) -> Iterator[LogPart]:
    """Parts of a trial's output beyond `after`, each once and in order, until it has its outcome and all were given.

    Raises:
        ServiceError: the service refuses it, or has been away for longer than `outage_seconds`.
    """
    return _followed(transport, f"{path}/stream", {}, after, outage_seconds, _later)


def _followed(
    transport: Transport,
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


def _in_order(messages: Messages, after: int) -> Iterator[tuple[int, Event | Progress]]:
    """The events beyond `after`, as far as they follow one upon the other."""
    given = 0
    for kind, data in messages:
        if kind == "progress":
            yield after + given, _decoded(Progress, data)
            continue
        event = _decoded(Event, data)
        if event.sequence > after + 1 + given:
            if not given:
                raise ServiceError(f"events: {after + 1} is missing before {event.sequence}; ask who runs the service")
            return
        if event.sequence == after + 1 + given:
            given += 1
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
