"""Batches database calls: requests that arrive during a call share the next one.

A call costs about the same for one question as for ten. So a busy service makes a few large calls, and an idle one answers
at once.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

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
