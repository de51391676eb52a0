"""Live events: from any point, in order, each once, to the end of the job."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.testclient import TestClient

from api.events import EventHub
from search_spaces.outcome import JobState
from storage.errors import DatabaseUnavailableError
from storage.owners import current_owner
from storage.records import EventRecord
from storage.store import Store
from tests.api.conftest import measure, problem_of, submit


def sequences(text: str) -> list[int]:
    return [int(line.removeprefix("id: ")) for line in text.splitlines() if line.startswith("id: ")]


def test_a_page_of_events(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    measure(store, job_id)
    page = client.get(f"/v1/jobs/{job_id}/events", params={"after": 2, "limit": 3}).json()
    assert [event["sequence"] for event in page["items"]] == [3, 4, 5]
    assert page["next"] == 5


@pytest.mark.parametrize("after", [0, 3])
def test_a_stream_goes_from_any_point_to_the_end_of_the_job(client: TestClient, store: Store, after: int) -> None:
    job_id = submit(client)["id"]
    lease = store.claim(current_owner())
    assert lease is not None
    # The third: who claims to know what is not there yet is told from the last one on.
    store.add_event(lease, "note", {"number": 0})

    def work() -> None:
        for number in range(1, 40):
            store.add_event(lease, "note", {"number": number})
            time.sleep(0.01)
        store.release(lease, JobState.SUCCEEDED, "BUDGET", "")

    worker = threading.Thread(target=work)
    worker.start()
    headers = {"Last-Event-ID": str(after)} if after else {}
    answer = client.get(f"/v1/jobs/{job_id}/events/stream", headers=headers)
    worker.join()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert sequences(answer.text) == list(range(after + 1, 44))
    assert "event: job_released" in answer.text
    again = client.get(f"/v1/jobs/{job_id}/events/stream", headers={"Last-Event-ID": "43"})
    assert (again.status_code, again.content) == (204, b"")


@pytest.mark.parametrize("last", ["x", "-1", "1" * 19, "²"])
def test_a_bad_point_is_refused(client: TestClient, last: str) -> None:
    job_id = submit(client)["id"]
    answer = client.get(f"/v1/jobs/{job_id}/events/stream", headers={b"Last-Event-ID": last.encode()})
    assert problem_of(answer, 422)["errors"][0]["field"] == "Last-Event-ID"


def test_streams_share_one_look_at_the_database(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = store.create_job({}).id
    lease = store.acquire(job_id, current_owner())
    reads: list[str] = []
    looks: list[int] = []
    for name in ("events", "news", "exact_jobs"):
        real: Callable = getattr(store, name)
        monkeypatch.setattr(store, name, lambda *asked, name=name, real=real: reads.append(name) or real(*asked))

    async def follow(hub: EventHub) -> list[int]:
        return sequences(b"".join([part async for part in hub.stream(job_id, 0, 2)]).decode())

    async def run() -> list[list[int]]:
        hub = EventHub(store, poll_seconds=0.02)
        look = hub.look
        hub.look = lambda *asked: looks.append(1) or look(*asked)  # type: ignore[method-assign]
        streams = [asyncio.create_task(follow(hub)) for _ in range(50)]
        while reads.count("events") < 50:  # until every stream reads what was there before it
            await asyncio.sleep(0.05)
        reads.clear()
        looks.clear()
        for number in range(20):
            await asyncio.to_thread(store.add_event, lease, "note", {"number": number})
            await asyncio.sleep(0.03)
        await asyncio.to_thread(store.release, lease, JobState.SUCCEEDED, "BUDGET", "")
        found = await asyncio.gather(*streams)
        assert hub.streams == 0
        return found

    found = asyncio.run(run())
    assert found == [list(range(1, 24))] * 50
    # 50 streams that are woken 20 times; how often the one look is taken is for the clock.
    assert len(reads) - len(looks) < 200, "each stream read the database by itself"


def test_streams_outlive_an_outage_of_the_database(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = store.create_job({}).id
    lease = store.acquire(job_id, current_owner())
    monkeypatch.setattr("api.hub.OUTAGE_SECONDS", 0.05)
    away = threading.Event()
    refused: list[str] = []

    def unless_away(method: Callable) -> Callable:
        def asked(*arguments: object) -> object:
            if away.is_set():
                refused.append(method.__name__)
                raise DatabaseUnavailableError("away")
            return method(*arguments)

        return asked

    for name in ("events", "news"):
        monkeypatch.setattr(store, name, unless_away(getattr(store, name)))

    async def follow(hub: EventHub) -> list[bytes]:
        return [part async for part in hub.stream(job_id, 0, 2)]

    async def run() -> list[bytes]:
        hub = EventHub(store, poll_seconds=0.02)
        away.set()
        stream = asyncio.create_task(follow(hub))
        while {"events", "news"} - {*refused}:
            await asyncio.sleep(0.01)
        away.clear()
        await asyncio.to_thread(store.release, lease, JobState.SUCCEEDED, "BUDGET", "")
        return await asyncio.wait_for(stream, 60)

    parts = asyncio.run(run())
    assert b": the database is away\n\n" in parts
    assert sequences(b"".join(parts).decode()) == [1, 2, 3]


def test_a_point_that_is_not_there_yet_holds_up_nobody(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.hub.KEEPALIVE_SECONDS", 240.0)
    job_id = submit(client)["id"]
    lease = store.claim(current_owner())
    assert lease is not None
    found: dict[str, list[int]] = {}

    def follow(last: str) -> None:
        answer = client.get(f"/v1/jobs/{job_id}/events/stream", headers={"Last-Event-ID": last})
        found[last] = sequences(answer.text)

    began = time.monotonic()
    threads = [threading.Thread(target=follow, args=(last,)) for last in ("1000000", "1")]
    for streams, thread in enumerate(threads, 1):
        thread.start()
        while client.app.state.hub.streams < streams:  # type: ignore[attr-defined]
            assert time.monotonic() - began < 120
            time.sleep(0.01)
    store.release(lease, JobState.SUCCEEDED, "BUDGET", "")
    for thread in threads:
        thread.join()
    assert found == {"1000000": [3], "1": [2, 3]}
    assert time.monotonic() - began < 120


def test_a_stream_of_old_events_keeps_nobody_waiting_for_new_ones(store: Store) -> None:
    job_id = store.create_job({}).id
    lease = store.acquire(job_id, current_owner())
    for number in range(100):
        store.add_event(lease, "note", {"number": number})
    version = store.job(job_id).version
    pages: list[int] = []
    ended = threading.Event()
    real = store.events

    def slow(name: str, after: int, limit: int) -> list[EventRecord]:
        pages.append(after)
        if len(pages) == 5:  # in the midst of history until who follows knows the end
            assert ended.wait(60)
        return real(name, after, min(limit, 2))

    store.events = slow  # type: ignore[method-assign]

    async def run() -> tuple[list[int], list[int], int]:
        hub = EventHub(store, poll_seconds=0.01)
        old = asyncio.create_task(all_of(hub.stream(job_id, 0, version)))
        live = asyncio.create_task(all_of(hub.stream(job_id, version, version)))
        while len(pages) < 5:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(store.release, lease, JobState.SUCCEEDED, "BUDGET", "")
        found = await live
        meanwhile = len(pages)
        ended.set()
        return await old, found, meanwhile

    async def all_of(parts: AsyncIterator[bytes]) -> list[int]:
        return sequences(b"".join([part async for part in parts]).decode())

    old, live, meanwhile = asyncio.run(run())
    assert old == list(range(1, version + 2))
    assert live == [version + 1]
    assert meanwhile < len(pages), "who follows waited for who reads history"
