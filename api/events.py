"""Live events: one look at the database serves every stream."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import islice

from api.views import event_view
from storage.errors import DatabaseUnavailableError
from storage.records import ENDED, EventRecord, JobNews
from storage.store import Store

POLL_SECONDS = 0.2
OUTAGE_SECONDS = 1.0
KEEPALIVE_SECONDS = 15.0
PAGE = 500
CACHED = 2000
"""Events of a job that are kept encoded for the streams that follow it."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Feed:
    """What is known of a job that somebody follows."""

    last: int
    """Sequence up to which the cache goes."""
    followers: int = 0
    over: bool = False
    """Whether nothing comes after `last`."""
    cache: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=CACHED))
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, news: JobNews | None) -> bool:
        """Add what the database tells, None being that the job is gone; return whether it was anything."""
        for event in news.events if news else ():
            self.cache.append(_encoded(event))
            self.last = event.sequence
        was_over = self.over
        self.over = news is None or (news.state in ENDED and news.version <= self.last)
        anything = bool(news and news.events) or self.over is not was_over
        if anything:
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()
        return anything


class EventHub:
    """Follows the jobs that have streams. A stream that is behind the cache reads the database by itself."""

    def __init__(self, store: Store, poll_seconds: float = POLL_SECONDS) -> None:
        self._store, self._poll_seconds = store, poll_seconds
        self._feeds: dict[str, _Feed] = {}
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    @property
    def streams(self) -> int:
        """Streams that are open."""
        return sum(feed.followers for feed in self._feeds.values())

    def close(self) -> None:
        """End every stream."""
        self.closed = True
        for feed in self._feeds.values():
            feed.changed.set()
        if self._task is not None:
            self._task.cancel()

    async def stream(self, job_id: str, after: int, version: int) -> AsyncIterator[bytes]:
        """Events of the job beyond `after`, each once and in order, until the job has ended and all were given.

        `version` is that of the job as it was just read: what is older is history, which no follower waits for. Outages of
        the database are waited for: the client hears comments meanwhile.
        """
        feed = self._feeds.setdefault(job_id, _Feed(version))
        feed.followers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        try:
            yield b"retry: 1000\n\n"
            while not self.closed:
                changed = feed.changed
                try:
                    parts = await self._next(job_id, feed, after)
                except DatabaseUnavailableError:
                    yield b": the database is away\n\n"
                    await asyncio.sleep(OUTAGE_SECONDS)
                    continue
                if parts:
                    after = parts[-1][0]
                    yield b"".join(part for _, part in parts)
                elif feed.over:
                    return
                else:
                    try:
                        async with asyncio.timeout(KEEPALIVE_SECONDS):
                            await changed.wait()
                    except TimeoutError:
                        yield b": still here\n\n"
        finally:
            feed.followers -= 1
            if not feed.followers:
                self._feeds.pop(job_id, None)

    async def _next(self, job_id: str, feed: _Feed, after: int) -> list[tuple[int, bytes]]:
        """From the cache where it goes back that far, else a page of the database."""
        if after >= feed.last:
            return []
        if feed.cache and feed.cache[0][0] <= after + 1:
            return list(islice(feed.cache, after + 1 - feed.cache[0][0], None))
        return [_encoded(event) for event in await asyncio.to_thread(self._store.events, job_id, after, PAGE)]

    async def _follow(self) -> None:
        """Look at all followed jobs at once, and wake the streams of those that have news."""
        while not self.closed and self._feeds:
            pause = self._poll_seconds
            try:
                known = {job_id: feed.last for job_id, feed in self._feeds.items()}
                news = await asyncio.to_thread(self._store.news, known, PAGE)
                for job_id in known:
                    feed, found = self._feeds.get(job_id), news.get(job_id)
                    if feed is not None and feed.last == known[job_id] and feed.take(found) and found and not feed.over:
                        # A job that has more news than fit one look is looked at again at once.
                        pause = 0.0 if found.version > feed.last else pause
            except DatabaseUnavailableError as error:
                log.error("%s", error)
                pause = OUTAGE_SECONDS
            except Exception:
                # Whatever it is, the streams of all jobs hang on this task.
                log.exception("events could not be read")
                pause = OUTAGE_SECONDS
            await asyncio.sleep(pause)


def _encoded(event: EventRecord) -> tuple[int, bytes]:
    """The event as a message of `text/event-stream`: its sequence is the id that a client sends back."""
    data = event_view(event).model_dump_json()
    # The kind is ours, or a word of the loop's: a line break in it would break the stream.
    kind = json.dumps(event.kind)[1:-1]
    return event.sequence, f"id: {event.sequence}\nevent: {kind}\ndata: {data}\n\n".encode()
