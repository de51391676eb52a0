"""Live events of a job: each once and in order, over broken connections and restarts of the service."""

import json
import time
from collections.abc import Iterator

from autotune.client.errors import ServiceError, UnavailableError, UnreachableError
from autotune.client.problems import one_line
from autotune.client.transport import Transport
from autotune.client.views import Event, EventPage, decode

PAUSE_SECONDS = 0.2
"""Before a stream is opened again; up to ten times as long while nothing answers."""


def known_events(transport: Transport, path: str, after: int) -> Iterator[Event]:
    """The events beyond `after` that there are now."""
    while items := (page := transport.get(EventPage, path, {"after": after})).items:
        yield from items
        after = page.next


def follow_events(transport: Transport, path: str, after: int, outage_seconds: float) -> Iterator[Event]:
    """Events beyond `after` until the job has ended and all were given.

    1. Open a stream from the last event that is known. 204: the job has ended, and nothing is left.
    2. Give what comes, as long as each is the next one. One that is known already is left out; one that is not the next means
       that something was lost on the way.
    3. When the stream ends, breaks or falls silent, go to 1: the service gives whatever is missing. Only its first event being
       the wrong one cannot be mended so.

    Raises:
        ServiceError: the service refuses it, or has been away for longer than `outage_seconds`.
    """
    lost, pause = time.monotonic(), PAUSE_SECONDS
    while True:
        opened = False
        try:
            with transport.stream(f"{path}/stream", {"Last-Event-ID": str(after)}) as messages:
                if messages is None:
                    return
                opened = True
                for event in _in_order(map(_event, messages), after):
                    after = event.sequence
                    yield event
        except (UnreachableError, UnavailableError):
            if not opened and time.monotonic() - lost > outage_seconds:
                raise
        if opened:
            lost, pause = time.monotonic(), PAUSE_SECONDS
        time.sleep(pause)
        pause = min(2 * pause, 10 * PAUSE_SECONDS)


def _in_order(events: Iterator[Event], after: int) -> Iterator[Event]:
    """The events beyond `after`, as far as they follow one upon the other."""
    given = 0
    for event in events:
        if event.sequence > after + 1 + given:
            if not given:
                raise ServiceError(f"events: {after + 1} is missing before {event.sequence}; ask who runs the service")
            return
        if event.sequence == after + 1 + given:
            given += 1
            yield event


def _event(data: str) -> Event:
    try:
        return decode(Event, json.loads(data))
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{one_line(data)[:100]!r} cannot be read ({error})"
        raise ServiceError(f"events: {problem}; use the client of the service's version") from error
