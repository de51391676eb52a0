"""What requests compute has threads of its own, few of them, and ends."""

import asyncio
import contextvars
import threading

import pytest
from starlette.exceptions import HTTPException

from api.computing import ThreadPool
from search_spaces.checkpoints import checkpoint
from search_spaces.errors import SpaceTooLargeError


def endless() -> None:
    """What passes checkpoints for ever."""
    while True:
        checkpoint()


def test_more_than_may_wait_are_refused_at_once() -> None:
    may_end = threading.Event()

    async def run() -> list[int | None]:
        pool = ThreadPool("computed", threads=1, waiting=2)
        tasks = [asyncio.create_task(pool.run(may_end.wait, 60)) for _ in range(5)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert not may_end.is_set()
        may_end.set()
        await asyncio.wait(tasks)
        assert done <= set(tasks[3:])
        pool.close()
        return [_status(task) for task in tasks]

    assert asyncio.run(run()) == [None] * 3 + [503] * 2


def test_who_finds_no_thread_in_time_is_told_when_to_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.computing.PATIENCE_SECONDS", 0.01)
    may_end = threading.Event()

    async def run() -> HTTPException:
        pool = ThreadPool("computed", threads=1)
        first = asyncio.create_task(pool.run(may_end.wait, 60))
        await asyncio.sleep(0)
        with pytest.raises(HTTPException) as refused:
            await pool.run(may_end.wait, 60)
        may_end.set()
        await first
        assert await pool.run(lambda: "free again") == "free again"
        pool.close()
        return refused.value

    refused = asyncio.run(run())
    assert refused.status_code == 503
    assert refused.headers is not None and int(refused.headers["Retry-After"]) > 0


def test_a_client_that_goes_away_frees_no_thread() -> None:
    may_end = threading.Event()

    async def run() -> None:
        pool = ThreadPool("computed", threads=1)
        first = asyncio.create_task(pool.run(may_end.wait, 60))
        await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.create_task(pool.run(lambda: "after it"))
        await asyncio.wait([first])
        assert not (await asyncio.wait([second], timeout=0.05))[0]
        may_end.set()
        assert await second == "after it"
        pool.close()

    asyncio.run(run())


def test_a_call_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.computing.CALL_SECONDS", 0.05)

    async def run() -> None:
        pool = ThreadPool("computed", threads=1)
        with pytest.raises(SpaceTooLargeError, match="takes more than"):
            await pool.run(endless)
        assert await pool.run(threading.current_thread) is not threading.current_thread()
        pool.close()

    asyncio.run(run())


def test_a_call_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr("api.computing.CALL_SECONDS", 0.2)
    monkeypatch.setattr("api.computing.time.sleep", rests.append)

    async def run() -> None:
        pool = ThreadPool("computed", threads=1)
        with pytest.raises(SpaceTooLargeError):
            await pool.run(endless)
        pool.close()

    asyncio.run(run())
    assert len(rests) > 1


def test_what_belongs_to_the_request_is_known_in_the_thread() -> None:
    span = contextvars.ContextVar("span", default="")

    async def run() -> str:
        pool = ThreadPool("computed", threads=1)
        span.set("of the request")
        try:
            return await pool.run(span.get)
        finally:
            pool.close()

    assert asyncio.run(run()) == "of the request"


def _status(task: "asyncio.Task[bool]") -> int | None:
    error = task.exception()
    return error.status_code if isinstance(error, HTTPException) else None
