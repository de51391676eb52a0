"""Thread pools for work besides database access: one for each kind of work, so that no kind waits for another.

Database access uses the framework's threads. Computation (resolving, counting, predicting, figures) has few threads: they
share one interpreter, and more of them would only delay each read. DNS look-ups have their own pool, because an unresponsive
name server blocks a thread for half a minute.
"""

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Generic, ParamSpec, TypeVar

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from autotune.errors import AutotuneError
from search_spaces.errors import SearchSpaceError, SpaceTooLargeError
from search_spaces.lattice import checkpoints

P = ParamSpec("P")
T = TypeVar("T")
PATIENCE_SECONDS = 5.0
"""How long a request waits for a thread before it gets a 503 response."""
CALL_SECONDS = 30.0
"""Time limit after which a call ends at its next checkpoint. Most calls have tighter limits, in steps."""


class ThreadPool:
    """A thread pool for one kind of work. Used from one event loop."""

    def __init__(self, kind: str, threads: int, waiting: int = 100) -> None:
        """
        Args:
            kind: participle for the message when a request is refused: "too much is being {kind}".
            threads: most concurrent calls.
            waiting: most calls that wait for a thread.
        """
        self._kind, self._most = kind, threads + waiting
        self._places = asyncio.Semaphore(threads)
        self._new = partial(ThreadPoolExecutor, threads, thread_name_prefix=kind)
        self._threads = self._new()
        self._inside = 0

    async def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Run the call in a thread. Waiting for one occupies no thread. The call ends after `CALL_SECONDS`.

        Raises:
            HTTPException: 503, because too many calls wait, or no thread became free in time.
            SpaceTooLargeError: the call took too long.
        """
        if self._inside >= self._most:
            raise self._busy()
        self._inside += 1
        try:
            await self._place()
            context = contextvars.copy_context()  # tracing spans continue in the thread
            running = self._threads.submit(partial(context.run, partial(_paced, partial(call, *args, **options))))
            loop = asyncio.get_running_loop()

            def freed(_: object) -> None:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._places.release)

            # Release the place when the call ends, not when its client disconnects: the thread is still busy then.
            running.add_done_callback(freed)
            return await asyncio.wrap_future(running)
        finally:
            self._inside -= 1

    def close(self) -> None:
        """Cancel waiting calls. A service that restarts after this gets new threads."""
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
    """Run the call; at its checkpoints it yields to reads and the event loop, and ends when its time is up."""
    until, yielded = time.monotonic() + CALL_SECONDS, time.monotonic()

    def on_checkpoint() -> None:
        nonlocal yielded
        if time.monotonic() > until:
            problem = f"it takes more than {CALL_SECONDS:.0f} seconds of this server"
            raise SpaceTooLargeError("space", problem, "pin some knobs, or choose a smaller space")
        # Compute for 2 ms, then yield for 2 ms: a read needs the interpreter briefly, many times.
        if time.monotonic() - yielded > 0.002:
            time.sleep(0.002)
            yielded = time.monotonic()

    with checkpoints(on_checkpoint):
        try:
            return call()
        except (AutotuneError, SearchSpaceError) as error:
            # Free what the frames of a refused request hold, a whole space perhaps: here, not on the event loop, which would
            # wait. A refusal is answered without a traceback.
            refusal: BaseException | None = error
            while refusal is not None:
                refusal.__traceback__ = None
                refusal = refusal.__cause__ or refusal.__context__
            raise


@dataclass(frozen=True, slots=True)
class ThreadPools:
    """The pools of one service, besides the framework's threads for the database."""

    submitting: ThreadPool
    """Resolves submissions, within `Settings.submission_steps`."""
    computing: ThreadPool
    """Counts, predictions, plans, figures, exports."""
    naming: ThreadPool
    """Resolution of host names."""

    def close(self) -> None:
        """Cancel waiting calls."""
        for pool in (self.submitting, self.computing, self.naming):
            pool.close()


async def _pools(request: Request) -> ThreadPools:
    pools: ThreadPools = request.app.state.pools
    return pools


async def _computing(request: Request) -> ThreadPool:
    return (await _pools(request)).computing


PoolsOf = Annotated[ThreadPools, Depends(_pools)]
Computing = Annotated[ThreadPool, Depends(_computing)]


Q = TypeVar("Q")
A = TypeVar("A")


class RequestBatcher(Generic[Q, A]):
    """Answers questions in a thread, in order of arrival. Each call begins after its questions were asked."""

    def __init__(self, answer: Callable[[Sequence[Q]], Sequence[A | Exception]], most: int) -> None:
        """
        Args:
            answer: returns for each question its answer, or an exception to raise for it; an exception that `answer` itself
                raises is raised for all questions of the call.
            most: most questions of one call.
        """
        self._answer, self._most = answer, most
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """Return the answer to the question, computed after this call."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            try:
                answers = await asyncio.to_thread(self._answer, [question for question, _ in batch])
            except Exception as error:
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue  # its client disconnected
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
