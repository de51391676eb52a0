"""Cache of API keys, valid for a few seconds."""

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from storage.errors import DatabaseUnavailableError
from storage.records import ApiKey
from storage.store import Store

KEY_SECONDS = 4.0
"""How long a valid key is cached, which is also the longest time that a revoked key keeps working."""
CHECK_SECONDS = 0.5
"""How often a stream checks its key. With `KEY_SECONDS`, revoking a key ends its streams within 5 s."""
MOST_KEYS = 10_000
"""Most cached keys; the one that was looked up first is removed first."""


@dataclass(frozen=True, slots=True)
class _Known:
    key: ApiKey
    until: float


class KeyReader:
    """Looks up keys, and caches valid ones for `KEY_SECONDS`. Invalid keys are looked up each time."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[ApiKey | None]] = {}
        self._notes: set[asyncio.Task[None]] = set()

    async def key(self, text: str) -> ApiKey | None:
        """The key with that text; None: it is not a key, was revoked, or has expired."""
        # Keep a digest, not the text, so that memory contains no usable key.
        name = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        known = self._known.get(name)
        if known is not None and self._clock() < known.until and not _has_expired(known.key):
            return known.key
        if name not in self._asked:
            self._asked[name] = asyncio.create_task(self._look(name, text))
        return await asyncio.shield(self._asked[name])

    async def _look(self, name: bytes, text: str) -> ApiKey | None:
        began = self._clock()
        try:
            key = await asyncio.to_thread(self._store.authenticate, text)
        finally:
            del self._asked[name]
        self._known.pop(name, None)
        if key is not None:
            self._known[name] = _Known(key, began + KEY_SECONDS)
            if len(self._known) > MOST_KEYS:
                self._known.popitem(last=False)
            note = asyncio.create_task(self._note(key))
            self._notes.add(note)
            note.add_done_callback(self._notes.discard)
        return key

    async def _note(self, key: ApiKey) -> None:
        """Record the use of a key in the background: the database may be full, or its writers busy."""
        with contextlib.suppress(DatabaseUnavailableError):
            await asyncio.to_thread(self._store.note_key_use, key)

    async def while_valid(self, text: str, parts: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """The parts of a stream, until its key is revoked or expires. An outage of the database does not end a stream."""
        coming: asyncio.Future[bytes] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(parts))
                done, _ = await asyncio.wait((coming,), timeout=CHECK_SECONDS)
                if not await self._is_valid(text):
                    return
                if done:
                    try:
                        part = coming.result()
                    except StopAsyncIteration:
                        return
                    finally:
                        coming = None
                    yield part
        finally:
            if coming is not None:
                coming.cancel()
                with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                    await coming
            await parts.aclose()

    async def _is_valid(self, text: str) -> bool:
        try:
            return await self.key(text) is not None
        except DatabaseUnavailableError:
            return True


def _has_expired(key: ApiKey) -> bool:
    return key.expires is not None and key.expires <= datetime.now(UTC)
