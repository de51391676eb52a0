"""The owners' quotas: the only place where the service reads limits."""

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
"""How long the limits of an owner are cached."""
MOST_OWNERS = 10_000
"""Most owners whose limits are cached; the one that was looked up first is removed first."""


class OwnerLimits:
    """The limits of each owner. The store counts jobs, bytes, device-hours and webhooks when it writes them."""

    def __init__(self, store: Store, defaults: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._defaults, self._clock = store, defaults, clock
        self._known: OrderedDict[str, tuple[float, Quotas]] = OrderedDict()
        self.streams: Counter[str] = Counter()
        """Owner -> open streams of this process."""

    async def most(self, owner: str, quota: Quota) -> float | None:
        """The limit of an owner, at most `LIMIT_SECONDS` old; None: no limit."""
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
        """Hold a place for one stream of this process.

        Raises:
            HTTPException: 429, because the owner has the most streams allowed.
        """
        most = await self.most(owner, Quota.STREAMS)
        if most is not None and self.streams[owner] >= most:
            detail = f"streams: {most:g} of yours are open on this process; close some, or follow fewer jobs"
            raise HTTPException(429, detail, {"Retry-After": "10"})
        self.streams[owner] += 1
        try:
            yield
        finally:
            self.streams[owner] -= 1
            if not self.streams[owner]:
                del self.streams[owner]

    def uses(self, owner: str) -> list[QuotaUse]:
        """What an owner uses of each quota. Runs in a thread."""
        return [
            replace(item, used=float(self.streams[owner])) if item.quota is Quota.STREAMS else item
            for item in self._store.quotas(owner, self._defaults)
        ]
