"""Live events: from any point, in order, each once, to the end of the job."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.testclient import TestClient

from api.connections import ConnectionLimits, Connections
from api.hub import EventHub
from api.metrics import Metrics, ProcessMetrics
from api.routes.operations import DiskCheck, readiness
from search_spaces.outcome import JobState
from search_spaces.shared_records import JobEvent
from storage.errors import DatabaseUnavailableError
from storage.leases import current_owner
from storage.records import Submission
from storage.service_records import Quotas
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


@pytest.mark.prove
@pytest.mark.parametrize("after", [0, 3])
def test_a_stream_goes_from_any_point_to_the_end_of_the_job(client: TestClient, store: Store, after: int) -> None:
    job_id = submit(client)["id"]
    lease = store.queue.claim(current_owner())
    assert lease is not None
    # The third: who claims to know what is not there yet is told from the last one on.
    store.events.add(lease, "note", {"number": 0})

    def work() -> None:
        for number in range(1, 40):
            store.events.add(lease, "note", {"number": number})
            time.sleep(0.01)
        store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "")

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


@pytest.mark.prove
@pytest.mark.parametrize("last", ["x", "-1", "1" * 19, "²"])
def test_a_bad_point_is_refused(client: TestClient, last: str) -> None:
    job_id = submit(client)["id"]
    answer = client.get(f"/v1/jobs/{job_id}/events/stream", headers={b"Last-Event-ID": last.encode()})
    assert problem_of(answer, 422)["errors"][0]["field"] == "Last-Event-ID"


def test_streams_share_one_look_at_the_database(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = store.jobs.create({}).id
    lease = store.jobs.acquire(job_id, current_owner())
    reads: list[str] = []
    looks: list[int] = []
    for part, name in ((store.events, "of"), (store.events, "news"), (store.jobs, "exact")):
        real: Callable = getattr(part, name)
        monkeypatch.setattr(part, name, lambda *asked, name=name, real=real: reads.append(name) or real(*asked))

    async def follow(hub: EventHub) -> list[int]:
        return sequences(b"".join([part async for part in hub.stream(job_id, 0, 2)]).decode())

    async def run() -> list[list[int]]:
        hub = EventHub(store, poll_seconds=0.02)
        look = hub.look
        hub.look = lambda *asked: looks.append(1) or look(*asked)  # type: ignore[method-assign]
        streams = [asyncio.create_task(follow(hub)) for _ in range(50)]
        while reads.count("of") < 50:  # until every stream reads what was there before it
            await asyncio.sleep(0.05)
        reads.clear()
        looks.clear()
        for number in range(20):
            await asyncio.to_thread(store.events.add, lease, "note", {"number": number})
            await asyncio.sleep(0.03)
        await asyncio.to_thread(store.jobs.release, lease, JobState.SUCCEEDED, "BUDGET", "")
        found = await asyncio.gather(*streams)
        assert hub.streams == 0
        return found

    found = asyncio.run(run())
    assert found == [list(range(1, 24))] * 50
    # 50 streams that are woken 20 times; how often the one look is taken is for the clock.
    assert len(reads) - len(looks) < 200, "each stream read the database by itself"


def test_streams_outlive_an_outage_of_the_database(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = store.jobs.create({}).id
    lease = store.jobs.acquire(job_id, current_owner())
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

    for name in ("of", "news"):
        monkeypatch.setattr(store.events, name, unless_away(getattr(store.events, name)))

    async def follow(hub: EventHub) -> list[bytes]:
        return [part async for part in hub.stream(job_id, 0, 2)]

    async def run() -> list[bytes]:
        hub = EventHub(store, poll_seconds=0.02)
        away.set()
        stream = asyncio.create_task(follow(hub))
        while {"of", "news"} - {*refused}:
            await asyncio.sleep(0.01)
        away.clear()
        await asyncio.to_thread(store.jobs.release, lease, JobState.SUCCEEDED, "BUDGET", "")
        return await asyncio.wait_for(stream, 60)

    parts = asyncio.run(run())
    assert b": the database is away\n\n" in parts
    assert sequences(b"".join(parts).decode()) == [1, 2, 3]


def test_a_point_that_is_not_there_yet_holds_up_nobody(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.hub.KEEPALIVE_SECONDS", 240.0)
    job_id = submit(client)["id"]
    lease = store.queue.claim(current_owner())
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
    store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "")
    for thread in threads:
        thread.join()
    assert found == {"1000000": [3], "1": [2, 3]}
    assert time.monotonic() - began < 120


def test_a_stream_of_old_events_keeps_nobody_waiting_for_new_ones(store: Store) -> None:
    job_id = store.jobs.create({}).id
    lease = store.jobs.acquire(job_id, current_owner())
    for number in range(100):
        store.events.add(lease, "note", {"number": number})
    version = store.jobs.get(job_id).version
    pages: list[int] = []
    ended = threading.Event()
    real = store.events.of

    def slow(name: str, after: int, limit: int) -> list[JobEvent]:
        pages.append(after)
        if len(pages) == 5:  # in the midst of history until who follows knows the end
            assert ended.wait(60)
        return real(name, after, min(limit, 2))

    store.events.of = slow  # type: ignore[method-assign]

    async def run() -> tuple[list[int], list[int], int]:
        hub = EventHub(store, poll_seconds=0.01)
        old = asyncio.create_task(all_of(hub.stream(job_id, 0, version)))
        live = asyncio.create_task(all_of(hub.stream(job_id, version, version)))
        while len(pages) < 5:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(store.jobs.release, lease, JobState.SUCCEEDED, "BUDGET", "")
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


@pytest.mark.prove
def test_more_than_a_thousand_jobs_that_changed_at_once(store: Store) -> None:
    """Once they were one condition each of one statement, which SQLite refuses, and every stream of the service stood still."""
    made = [job for job, _ in store.queue.submit_all([({"model": "x"}, Submission())] * 1200)]  # type: ignore[misc]
    hub = EventHub(store)
    found = hub.look({job.id: 0 for job in made}, [job.id for job in made])
    assert len(found) == 1200
    assert all(len(news.parts) == 1 for news in found.values())


def test_what_one_look_reads_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.hub.LOOK", 10)
    jobs = [store.jobs.create({}).id for _ in range(4)]
    for job_id in jobs:
        lease = store.jobs.acquire(job_id, current_owner())
        for number in range(5):
            store.events.add(lease, "note", {"number": number})
    found = EventHub(store).look(dict.fromkeys(jobs, 0), ())
    assert [(len(news.parts), news.more) for news in found.values()] == [(2, True)] * 4


def test_an_error_that_repeats_is_told(store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("api.hub.OUTAGE_SECONDS", 0.01)
    job_id = store.jobs.create({}).id
    lease = store.jobs.acquire(job_id, current_owner())
    broken = threading.Event()
    broken.set()
    real = store.events.news

    def news(*asked: object) -> object:
        if broken.is_set():
            raise ValueError("no such thing")
        return real(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(store.events, "news", news)

    async def run() -> None:
        hub = EventHub(store, poll_seconds=0.01)
        follower = asyncio.create_task(asyncio.wait_for(anext_of_all(hub), 60))
        while hub.failures < 10:
            await asyncio.sleep(0.01)
        found = await asyncio.to_thread(readiness, store, DiskCheck(store), [hub])
        assert (found.status, found.streams.partition(":")[0]) == ("degraded", "failed")
        assert caplog.text.count("news could not be read") == 1
        failed = hub.failed
        text = Metrics(store, ProcessMetrics(Connections(ConnectionLimits()), {"events": hub})).text()
        assert f'autotune_stream_failures_total{{kind="events"}} {float(failed)}' in text or hub.failed > failed
        broken.clear()
        await asyncio.to_thread(store.jobs.release, lease, JobState.SUCCEEDED, "BUDGET", "")
        assert sequences((await follower).decode()) == [1, 2, 3]
        assert hub.failures == 0

    async def anext_of_all(hub: EventHub) -> bytes:
        return b"".join([part async for part in hub.stream(job_id, 0, 2)])

    asyncio.run(run())


def test_an_owner_has_so_many_streams(serve: Callable[..., TestClient], store: Store) -> None:
    client = serve(quotas=Quotas(streams=2))
    job_id = submit(client)["id"]
    open_streams = client.app.state.limits.streams  # type: ignore[attr-defined]
    open_streams.update({"": 2, "somebody else": 2})
    refused = client.get(f"/v1/jobs/{job_id}/events/stream")
    assert "streams: 2 of yours" in problem_of(refused, 429)["detail"]
    assert int(refused.headers["retry-after"]) > 0
    open_streams[""] = 1
    client.post(f"/v1/jobs/{job_id}/cancel")
    assert sequences(client.get(f"/v1/jobs/{job_id}/events/stream").text) == [1, 2]
    assert open_streams[""] == 1
