"""The quotas of owners, as the service asks for them: the one place that knows a limit."""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from starlette.exceptions import HTTPException

from storage.service_records import Quota, Quotas, QuotaUse
from storage.store import Store

LIMIT_SECONDS = 5.0
"""How long the limits of an owner are not looked up again."""
MOST_OWNERS = 10_000
"""Owners whose limits are remembered; the one that was looked up first is forgotten first."""


class OwnerLimits:
    """What each owner may take. Jobs, bytes, device-hours and webhooks are counted where they are written, by the store."""

    def __init__(self, store: Store, defaults: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._defaults, self._clock = store, defaults, clock
        self._known: OrderedDict[str, tuple[float, Quotas]] = OrderedDict()
        self.streams: Counter[str] = Counter()
        """Owner -> streams that are open here."""

    async def most(self, owner: str, quota: Quota) -> float | None:
        """The limit of an owner, as it was within the last `LIMIT_SECONDS`; None: there is none."""
        now = self._clock()
        until, limits = self._known.get(owner, (now, self._defaults))
        if until <= now:
            limits = await asyncio.to_thread(self._store.limits, owner, self._defaults)
            self._known.pop(owner, None)
            self._known[owner] = (now + LIMIT_SECONDS, limits)
            while len(self._known) > MOST_OWNERS:
                self._known.popitem(last=False)
        return limits.of(quota)

    @asynccontextmanager
    async def stream(self, owner: str) -> AsyncIterator[None]:
        """A place for one stream of this process.

        Raises:
            HTTPException: the owner has as many as one may have.
        """
        most = await self.most(owner, Quota.STREAMS)
        if most is not None and self.streams[owner] >= most:
            told = f"streams: {most:g} of yours are open on this process; close some, or follow fewer jobs"
            raise HTTPException(429, told, {"Retry-After": "10"})
        self.streams[owner] += 1
        try:
            yield
        finally:
            self.streams[owner] -= 1
            if not self.streams[owner]:
                del self.streams[owner]

    def uses(self, owner: str) -> list[QuotaUse]:
        """What an owner has taken of each quota. In a thread."""
        return [
            replace(item, used=float(self.streams[owner])) if item.quota is Quota.STREAMS else item
            for item in self._store.quotas(owner, self._defaults)
        ]
