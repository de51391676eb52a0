"""Threads for what requests need beside the database: one pool for each kind, so that none waits for work of another kind.

Reads and writes of the database have the threads of the framework. What computes (resolving, counting, predicting, figures) has
few: they take turns on one interpreter, and more of them would only make each read wait for its turn. What asks a name server
has its own, because one that does not answer holds a thread for half a minute.
"""

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ParamSpec, TypeVar

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from search_spaces.checkpoints import checkpoints
from search_spaces.errors import SpaceTooLargeError

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE_SECONDS = 5.0
"""How long a request waits for a thread before it is answered 503."""
CALL_SECONDS = 30.0
"""After which a call is ended at its next checkpoint. Most have narrower bounds of their own, in steps."""
TURN_SECONDS, REST_SECONDS = 0.002, 0.002
"""How long a call computes before it gives way, and for how long: a read needs the interpreter for moments, several times."""
WAITING = 100
"""Requests that may wait for a thread of one pool; further ones are answered 503 at once."""


class Pool:
    """Threads that one kind of work shares. Used from one event loop."""

    def __init__(self, kind: str, threads: int, waiting: int = WAITING) -> None:
        """
        Args:
            kind: what is being done too much of, where a request is refused.
            threads: calls at the same time.
            waiting: calls that wait for a thread at most.
        """
        self._kind, self._most = kind, threads + waiting
        self._places = asyncio.Semaphore(threads)
        self._new = partial(ThreadPoolExecutor, threads, thread_name_prefix=kind)
        self._threads = self._new()
        self._inside = 0

    async def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call it in a thread. Who waits for one holds none. After `CALL_SECONDS` the call is ended.

        Raises:
            HTTPException: 503, because too many wait, or no thread became free in time.
            SpaceTooLargeError: it took too long.
        """
        if self._inside >= self._most:
            raise self._busy()
        self._inside += 1
        try:
            await self._place()
            context = contextvars.copy_context()  # spans go on in the thread
            running = self._threads.submit(partial(context.run, partial(_paced, partial(call, *args, **options))))
            loop = asyncio.get_running_loop()

            def freed(_: object) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._places.release)

            # With the call, not with who waits for it: a client that goes away frees no thread.
            running.add_done_callback(freed)
            return await asyncio.wrap_future(running)
        finally:
            self._inside -= 1

    def close(self) -> None:
        """Begin nothing of what waits. A service that starts again after this has new threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._threads = self._new()

    async def _place(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            raise self._busy() from None

    def _busy(self) -> HTTPException:
        return HTTPException(503, f"too much is being {self._kind}; try again", {"Retry-After": "5"})


def _paced(call: Callable[[], T]) -> T:
    """Call it; at its checkpoints it gives way to reads and to the event loop, and ends when it has taken too long."""
    until, gave_way = time.monotonic() + CALL_SECONDS, time.monotonic()

    def answer() -> None:
        nonlocal gave_way
        if time.monotonic() > until:
            problem = f"it takes more than {CALL_SECONDS:.0f} seconds of this server"
            raise SpaceTooLargeError("space", problem, "pin some knobs, or choose a smaller space")
        if time.monotonic() - gave_way > TURN_SECONDS:
            time.sleep(REST_SECONDS)
            gave_way = time.monotonic()

    with checkpoints(answer):
        return call()


@dataclass(frozen=True, slots=True)
class Pools:
    """The pools of one service, beside the framework's own for the database."""

    submitting: Pool
    """Submissions: resolved within `Settings.submission_steps`."""
    computing: Pool
    """Counts, predictions, plans, figures, exports."""
    naming: Pool
    """Names of hosts that are resolved."""

    def close(self) -> None:
        """Begin nothing of what waits."""
        for pool in (self.submitting, self.computing, self.naming):
            pool.close()


async def _pools(request: Request) -> Pools:
    pools: Pools = request.app.state.pools
    return pools


async def _computing(request: Request) -> Pool:
    return (await _pools(request)).computing


PoolsOf = Annotated[Pools, Depends(_pools)]
Computing = Annotated[Pool, Depends(_computing)]
