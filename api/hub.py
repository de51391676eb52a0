"""Streams of server-sent events: one look at the database serves all that are open."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.limits import OwnerLimits
from storage.errors import DatabaseUnavailableError

POLL_SECONDS = 0.2
OUTAGE_SECONDS = 1.0
KEEPALIVE_SECONDS = 15.0
LOGGED_EVERY = 60
"""Failures in a row of which one is logged."""
STREAMED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""What keeps anybody in between from holding back a stream."""
log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
Part = tuple[int, bytes]
"""A message, encoded, and its number, which is its id: numbers grow, and may jump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one look finds of something that is followed."""

    parts: Collection[Part]
    """Beyond what is known."""
    over: bool
    """Whether nothing comes after these parts."""
    more: bool = False
    """Whether there are further parts already."""
    signs: Mapping[int, bytes] | None = None
    """What is so now, encoded: messages without a number, which only who asked for them is given. None: was not looked at."""


@dataclass(slots=True)
class _Feed:
    """What is known of something that somebody follows."""

    last: int
    """Number up to which the cache goes."""
    since: int
    """Number from which on it has everything."""
    cache: deque[Part]
    followers: int = 0
    wanting_signs: int = 0
    over: bool = False
    """Whether nothing comes after `last`."""
    signs: Mapping[int, bytes] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, news: News | None) -> None:
        """Add what the database tells, None being that it is gone, and wake who waits if it is anything."""
        before = (self.last, self.over, self.signs)
        for part in news.parts if news else ():
            if len(self.cache) == self.cache.maxlen:
                self.since = self.cache[0][0]
            self.cache.append(part)
            self.last = part[0]
        self.over = news is None or news.over
        if news is not None and news.signs is not None:
            self.signs = news.signs
        if (self.last, self.over, self.signs) != before:
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()


class Hub(ABC, Generic[K]):
    """Follows what has streams. A stream that is behind the cache reads the database by itself."""

    cached = 2000
    """Parts of each that are kept encoded for the streams that follow it."""

    def __init__(self, poll_seconds: float = POLL_SECONDS) -> None:
        self._poll_seconds = poll_seconds
        self._feeds: dict[K, _Feed] = {}
        self._task: asyncio.Task[None] | None = None
        self.closed = False
        self.failures = 0
        """Looks at the database that have failed one after another, whatever the reason."""
        self.failed = 0
        """Those that have failed since the process began."""

    @abstractmethod
    def look(self, known: Mapping[K, int], signs: Collection[K]) -> Mapping[K, News]:
        """What is new beyond these numbers, and how it stands with `signs`; what is not there is left out. In a thread."""

    @abstractmethod
    def read(self, key: K, after: int) -> list[Part]:
        """A page of the parts beyond `after`. In a thread."""

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

    async def stream(self, key: K, after: int, last: int, signs: bool = False) -> AsyncGenerator[bytes]:
        """Parts beyond `after`, each once and in order, until it is over and all were given.

        `last` is the number of the last part that was there just now: what is older is history, which no follower waits for.
        Outages of the database are waited for: the client hears comments meanwhile.
        """
        feed = self._feeds.setdefault(key, _Feed(last, last, deque(maxlen=self.cached)))
        feed.followers += 1
        feed.wanting_signs += signs
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
                elif signs and feed.signs != shown:
                    former, shown = shown, feed.signs
                    if new := [sign for name, sign in shown.items() if former.get(name) != sign]:
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
            feed.wanting_signs -= signs
            if not feed.wanting_signs:
                feed.signs = {}  # nobody looks at them any more
            if not feed.followers:
                self._feeds.pop(key, None)

    async def _next(self, key: K, feed: _Feed, after: int) -> list[Part]:
        """From the cache where it goes back that far, else a page of the database."""
        if after >= feed.last:
            return []
        if feed.cache and feed.since <= after:
            return [*takewhile(lambda part: part[0] > after, reversed(feed.cache))][::-1]
        return await asyncio.to_thread(self.read, key, after)

    async def _follow(self) -> None:
        """Look at all that is followed at once, and wake the streams of what has news."""
        while not self.closed and self._feeds:
            pause = self._poll_seconds
            try:
                known = {key: feed.last for key, feed in self._feeds.items()}
                signs = {key for key, feed in self._feeds.items() if feed.wanting_signs}
                found = await asyncio.to_thread(self.look, known, signs)
                self.failures = 0
                for key in known:
                    feed, news = self._feeds.get(key), found.get(key)
                    if feed is not None and feed.last == known[key]:
                        feed.take(news)
                        # What has more news than fit one look is looked at again at once.
                        pause = 0.0 if news is not None and news.more else pause
            except Exception as error:
                # Whatever it is, all streams hang on this task.
                self._note(error)
                pause = OUTAGE_SECONDS
            await asyncio.sleep(pause)

    def _note(self, error: Exception) -> None:
        """Count a failure. It is logged at first and once a minute, not at every look."""
        if self.failures % LOGGED_EVERY == 0:
            if isinstance(error, DatabaseUnavailableError):
                log.error("%s", error)
            else:
                log.error("news could not be read, which is tried again", exc_info=error)
        self.failures += 1
        self.failed += 1


class StreamAnswer(StreamingResponse):
    """An event stream that counts against its owner's quota as long as it is open."""

    def __init__(self, stream: AsyncIterator[bytes], limits: OwnerLimits, owner: str) -> None:
        super().__init__(stream, media_type="text/event-stream", headers=STREAMED)
        self._limits, self._owner = limits, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._limits.stream(self._owner):
            await super().__call__(scope, receive, send)


def message(number: int | None, kind: str, data: str) -> bytes:
    """A message of `text/event-stream`; its number, where it has one, is the id that a client sends back."""
    named = "" if number is None else f"id: {number}\n"
    return f"{named}event: {kind}\ndata: {data}\n\n".encode()
