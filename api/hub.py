"""Streams of server-sent events about jobs and about the output of trials: one database query serves all open streams."""

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, TypeVar

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.limits import OwnerLimits
from search_spaces.shared_records import JobEvent, LogPart
from storage.errors import DatabaseUnavailableError
from storage.records import ENDED
from storage.store import Store

POLL_SECONDS = 0.2
OUTAGE_SECONDS = 1.0
KEEPALIVE_SECONDS = 15.0
log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
Part = tuple[int, bytes]
"""The number of a message, which is its id, and the encoded message. Numbers increase, possibly with gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one query finds for one followed key."""

    parts: Collection[Part]
    """The parts after the last known one."""
    over: bool
    """Whether no parts will follow."""
    more: bool = False
    """Whether further parts exist already."""
    live: Mapping[int, bytes] | None = None
    """The current state as encoded messages without a number, for streams that want them. None: not queried."""


@dataclass(slots=True)
class _Feed:
    """The state of one followed key."""

    last: int
    """Number of the last part."""
    since: int
    """The cache has every part after this number."""
    cache: deque[Part]
    followers: int = 0
    wanting_live: int = 0
    over: bool = False
    """Whether no part will follow `last`."""
    live: Mapping[int, bytes] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, news: News | None) -> None:
        """Add news from the database (None: the key no longer exists), and wake the waiting streams if anything changed."""
        before = (self.last, self.over, self.live)
        for part in news.parts if news else ():
            if len(self.cache) == self.cache.maxlen:
                self.since = self.cache[0][0]
            self.cache.append(part)
            self.last = part[0]
        self.over = news is None or news.over
        if news is not None and news.live is not None:
            self.live = news.live
        if (self.last, self.over, self.live) != before:
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()


class Hub(ABC, Generic[K]):
    """Polls the database for all keys with streams. A stream that needs older parts than the cache reads them itself."""

    cached = 2000
    """Most encoded parts that are cached for each key."""

    def __init__(self, poll_seconds: float = POLL_SECONDS) -> None:
        self._poll_seconds = poll_seconds
        self._feeds: dict[K, _Feed] = {}
        self._task: asyncio.Task[None] | None = None
        self.closed = False
        self.failures = 0
        """Consecutive failed queries, for any reason."""
        self.failed = 0
        """Failed queries since the process started."""

    @abstractmethod
    def look(self, sequences: Mapping[K, int], live: Collection[K]) -> Mapping[K, News]:
        """Return the news after these numbers, with live messages for the keys in `live`; missing keys are left out. Runs in a
        thread."""

    @abstractmethod
    def read(self, key: K, after: int) -> list[Part]:
        """Return a page of the parts after `after`. Runs in a thread."""

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return sum(feed.followers for feed in self._feeds.values())

    def close(self) -> None:
        """End every stream."""
        self.closed = True
        for feed in self._feeds.values():
            feed.changed.set()
        if self._task is not None:
            self._task.cancel()

    async def stream(self, key: K, after: int, last: int, live: bool = False) -> AsyncGenerator[bytes]:
        """Yield the parts after `after`, each once and in order, until the key is over and all were sent.

        `last` is the number of the last existing part; the hub polls only for newer ones. During an outage of the database the
        stream waits and sends comments.
        """
        feed = self._feeds.setdefault(key, _Feed(last, last, deque(maxlen=self.cached)))
        feed.followers += 1
        feed.wanting_live += live
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        shown: Mapping[int, bytes] = {}
        try:
            yield b"retry: 1000\n\n"
            while not self.closed:
                changed = feed.changed
                try:
                    parts = await self._next(key, feed, after)
                except DatabaseUnavailableError:
                    yield b": the database is away\n\n"
                    await asyncio.sleep(OUTAGE_SECONDS)
                    continue
                if parts:
                    after = parts[-1][0]
                    yield b"".join(part for _, part in parts)
                elif live and feed.live != shown:
                    former, shown = shown, feed.live
                    if new := [message_bytes for name, message_bytes in shown.items() if former.get(name) != message_bytes]:
                        yield b"".join(new)
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
            feed.wanting_live -= live
            if not feed.wanting_live:
                feed.live = {}  # no stream wants them any more
            if not feed.followers:
                self._feeds.pop(key, None)

    async def _next(self, key: K, feed: _Feed, after: int) -> list[Part]:
        """The next parts, from the cache if it goes back far enough, else a page from the database."""
        if after >= feed.last:
            return []
        if feed.cache and feed.since <= after:
            return [*takewhile(lambda part: part[0] > after, reversed(feed.cache))][::-1]
        return await asyncio.to_thread(self.read, key, after)

    async def _follow(self) -> None:
        """Query all followed keys together, and wake the streams of keys with news."""
        while not self.closed and self._feeds:
            pause = self._poll_seconds
            try:
                sequences = {key: feed.last for key, feed in self._feeds.items()}
                live = {key for key, feed in self._feeds.items() if feed.wanting_live}
                key_news = await asyncio.to_thread(self.look, sequences, live)
                self.failures = 0
                for key in sequences:
                    feed, news = self._feeds.get(key), key_news.get(key)
                    if feed is not None and feed.last == sequences[key]:
                        feed.take(news)
                        # A key with more news than one query returns is queried again at once.
                        pause = 0.0 if news is not None and news.more else pause
            except Exception as error:
                # Continue after any error: all streams depend on this task.
                self._note(error)
                pause = OUTAGE_SECONDS
            await asyncio.sleep(pause)

    def _note(self, error: Exception) -> None:
        """Count a failure. The first one is logged, then one per minute."""
        if self.failures % 60 == 0:
            if isinstance(error, DatabaseUnavailableError):
                log.error("%s", error)
            else:
                log.error("news could not be read, which is tried again", exc_info=error)
        self.failures += 1
        self.failed += 1


class StreamAnswer(StreamingResponse):
    """An event stream that counts against its owner's quota while it is open."""

    def __init__(self, stream: AsyncIterator[bytes], limits: OwnerLimits, owner: str) -> None:
        # Keep proxies from buffering the stream.
        super().__init__(
            stream, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        self._limits, self._owner = limits, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._limits.stream(self._owner):
            await super().__call__(scope, receive, send)


def message(number: int | None, kind: str, data: bytes) -> bytes:
    """A message of `text/event-stream` with JSON data. A reconnecting client sends its number, if it has one."""
    id_line = "" if number is None else f"id: {number}\n"
    return f"{id_line}event: {kind}\ndata: ".encode() + data + b"\n\n"


LOOK = 5000
"""Most events per database query, but at least one for each followed job."""


class EventHub(Hub[str]):
    """Follows jobs. The live messages are the progress of their running attempts."""

    _EVENTS_PER_PAGE = 500

    def __init__(self, store: Store, poll_seconds: float = POLL_SECONDS) -> None:
        super().__init__(poll_seconds)
        self._store = store

    def look(self, sequences: Mapping[str, int], live: Collection[str]) -> Mapping[str, News]:
        progress = self._store.logs.progress(live) if live else {}
        job_news: dict[str, News] = {}
        for job_id, news in self._store.events.news(
            sequences, max(1, min(self._EVENTS_PER_PAGE, LOOK // len(sequences)))
        ).items():
            last = news.events[-1].sequence if news.events else sequences[job_id]
            # The kind of messages with the progress of running attempts.
            job_news[job_id] = News(
                parts=[_encoded_event(event) for event in news.events],
                over=news.state in ENDED and news.version <= last,
                more=news.version > last,
                live={
                    record.trial: message(None, "progress", to_json(record, inf_nan_mode="null")) for record in progress[job_id]
                }
                if job_id in progress
                else None,
            )
        return job_news

    def read(self, key: str, after: int) -> list[Part]:
        return [_encoded_event(event) for event in self._store.events.of(key, after, self._EVENTS_PER_PAGE)]


def _encoded_event(event: JobEvent) -> Part:
    # A line break in the kind would break the stream.
    kind = json.dumps(event.kind)[1:-1]
    return event.sequence, message(event.sequence, kind, to_json(event, inf_nan_mode="null"))


Trial = tuple[str, int]
"""A job's id and a trial's number."""


class LogHub(Hub[Trial]):
    """Follows trials."""

    _PARTS_PER_PAGE = 50

    cached = _PARTS_PER_PAGE
    """Fewer than other hubs: a part may have tens of kilobytes."""

    def __init__(self, store: Store, poll_seconds: float = 0.5) -> None:  # as often as workers write output
        super().__init__(poll_seconds)
        self._store = store

    def look(self, sequences: Mapping[Trial, int], live: Collection[Trial]) -> Mapping[Trial, News]:
        del live
        trial_news: dict[Trial, News] = {}
        for trial, news in self._store.logs.news(sequences, self._PARTS_PER_PAGE).items():
            more = bool(news.parts) and news.parts[-1].sequence < news.last
            trial_news[trial] = News(parts=[_encoded_part(part) for part in news.parts], over=news.over, more=more)
        return trial_news

    def read(self, key: Trial, after: int) -> list[Part]:
        return [_encoded_part(part) for part in self._store.logs.of(*key, after, self._PARTS_PER_PAGE)]


def _encoded_part(part: LogPart) -> Part:
    return part.sequence, message(part.sequence, "log", to_json(part))
