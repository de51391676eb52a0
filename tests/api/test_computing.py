"""What requests compute has threads of its own, few of them, and ends."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from starlette.exceptions import HTTPException

from api.auth import KEY_SECONDS, KeyReader
from api.computing import RequestBatcher, ThreadPool
from search_spaces.errors import SpaceTooLargeError
from search_spaces.lattice import checkpoint
from storage.errors import DatabaseUnavailableError
from storage.store import Store
from tests.api.conftest import REQUEST, problem_of, submit


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


def test_who_asks_while_a_call_is_under_way_shares_the_next() -> None:
    calls: list[list[int]] = []
    begun, may_end = threading.Event(), threading.Event()

    def answer(questions: Sequence[int]) -> list[int | Exception]:
        calls.append(list(questions))
        begun.set()
        may_end.wait(10)
        return [ValueError("odd") if question % 2 else question * 10 for question in questions]

    async def run() -> list[int | BaseException]:
        together = RequestBatcher(answer, most=3)
        first = asyncio.create_task(together.ask(0))
        await asyncio.to_thread(begun.wait, 10)
        others = [asyncio.create_task(together.ask(number)) for number in range(1, 7)]
        await asyncio.sleep(0)
        others[1].cancel()
        may_end.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    found = asyncio.run(run())
    assert calls == [[0], [1, 2, 3], [4, 5, 6]]
    assert [found[number] for number in (0, 4, 6)] == [0, 40, 60]
    assert all(isinstance(found[number], ValueError) for number in (1, 3, 5))
    assert isinstance(found[2], asyncio.CancelledError)


def test_a_call_that_fails_fails_all_who_asked_and_the_next_goes_on() -> None:
    failing = [True]

    def answer(questions: Sequence[int]) -> Sequence[int | Exception]:
        if failing.pop():
            raise ValueError("no database")
        return questions

    async def run() -> int:
        together = RequestBatcher(answer, most=3)
        with pytest.raises(ValueError, match="no database"):
            await together.ask(1)
        failing.append(False)
        return await together.ask(2)

    assert asyncio.run(run()) == 2


def test_a_key_is_looked_up_once_for_a_few_seconds_and_a_revoked_one_ends_with_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, text = store.keys.create("anna", {"read"})
    looks: list[str] = []
    real = store.keys.authenticate
    monkeypatch.setattr(store.keys, "authenticate", lambda given: looks.append(given) or real(given))
    now = [100.0]

    async def run() -> None:
        reader = KeyReader(store, lambda: now[0])
        assert [found.id for found in await asyncio.gather(*(reader.key(text) for _ in range(5))) if found] == [key.id] * 5
        assert len(looks) == 1
        store.keys.revoke(key.id)
        now[0] += KEY_SECONDS - 0.1
        assert await reader.key(text) is not None
        assert len(looks) == 1
        now[0] += 0.2
        assert await reader.key(text) is None
        assert await reader.key(text) is None
        assert len(looks) == 3, "a key that is not good is not remembered"

    asyncio.run(run())


def test_a_key_that_expires_is_not_known_longer(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [datetime.now(UTC)]
    monkeypatch.setattr("api.auth.datetime", SimpleNamespace(now=lambda zone: now[0]))
    with Store(database, clock=lambda: now[0]) as store:
        _, text = store.keys.create("anna", {"read"}, now[0] + timedelta(hours=1))

        async def run() -> None:
            reader = KeyReader(store, lambda: 0.0)
            assert await reader.key(text) is not None
            now[0] += timedelta(minutes=61)
            assert await reader.key(text) is None

        asyncio.run(run())


def test_submissions_at_once_are_answered_each_as_alone(serve, store: Store) -> None:
    client = serve()
    answers: dict[int, object] = {}

    def send(number: int) -> None:
        # Four keys; under the last one the bodies differ.
        key = number % 4
        body = REQUEST | {"seed": number if key == 3 else 0, "trials": 3}
        answers[number] = client.post("/v1/jobs", json=body, headers={"Idempotency-Key": f"key-{key}"})

    threads = [threading.Thread(target=send, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for key in range(3):
        assert len({answers[number].json()["id"] for number in range(key, 16, 4)}) == 1
    differing = [answers[number] for number in range(3, 16, 4)]
    assert sorted(answer.status_code for answer in differing) == [202, 422, 422, 422]
    assert problem_of(next(a for a in differing if a.status_code == 422), 422)["errors"][0]["field"] == "Idempotency-Key"
    assert len(store.jobs.newest()) == 4


def test_a_job_reads_as_it_is_after_a_write_that_was_answered(client, store: Store) -> None:
    job_id = submit(client)["id"]
    for verb, state in (("pause", "PAUSED"), ("resume", "QUEUED"), ("cancel", "CANCELLED")):
        client.post(f"/v1/jobs/{job_id}/{verb}")
        assert client.get(f"/v1/jobs/{job_id}").json()["state"] == state


def test_a_stream_ends_when_its_key_is_revoked_although_nothing_comes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.auth.CHECK_SECONDS", 0.01)
    monkeypatch.setattr("api.auth.KEY_SECONDS", 0.05)
    key, text = store.keys.create("anna", {"read"})
    ended: list[bool] = []

    async def parts() -> AsyncGenerator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()  # for ever, as a job does that waits for a worker
        finally:
            ended.append(True)

    async def run() -> list[bytes]:
        found = []
        async for part in KeyReader(store).while_valid(text, parts()):
            found.append(part)
            await asyncio.to_thread(store.keys.revoke, key.id)
        return found

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [b"first"]
    assert ended == [True], "the stream itself must let go of what it follows"


def test_a_stream_outlives_an_outage_of_the_database(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.auth.CHECK_SECONDS", 0.01)
    monkeypatch.setattr("api.auth.KEY_SECONDS", 0.0)
    _, text = store.keys.create("anna", {"read"})
    asked: list[str] = []
    enough = asyncio.Event()

    def away(given: str) -> None:
        asked.append(given)
        if len(asked) > 3:
            loop.call_soon_threadsafe(enough.set)
        raise DatabaseUnavailableError("away")

    monkeypatch.setattr(store.keys, "authenticate", away)

    async def parts() -> AsyncGenerator[bytes]:
        await enough.wait()
        yield b"after all"

    async def run() -> list[bytes]:
        nonlocal loop
        loop = asyncio.get_running_loop()
        return [part async for part in KeyReader(store).while_valid(text, parts())]

    loop: asyncio.AbstractEventLoop
    assert asyncio.run(asyncio.wait_for(run(), 60)) == [b"after all"]


def test_nobody_waits_until_the_use_of_a_key_is_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = store.keys.create("anna", {"read"})
    free = threading.Event()
    monkeypatch.setattr(store.keys, "note_use", lambda _: free.wait(60))

    async def run() -> None:
        assert await KeyReader(store).key(text) is not None
        assert not free.is_set()
        free.set()

    asyncio.run(run())
