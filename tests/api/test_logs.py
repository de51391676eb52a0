"""What trials print over REST: paged, as text, live from any point on; and what runs now."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.testclient import TestClient

from api.hub import LogHub
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import LogLines, Progress, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.records import Lease
from storage.store import Store
from tests.api.conftest import problem_of, submit


@pytest.fixture
def lease(client: TestClient, store: Store) -> Lease:
    """A submitted job that runs its first trial."""
    lease = store.jobs.acquire(submit(client)["id"], current_owner())
    store.trials.add(lease, TrialConfig(), Purpose.SEARCH)
    return lease


@pytest.fixture
def token(store: Store, lease: Lease) -> str:
    return store.attempts.start(lease, 0).token


def tell(store: Store, lease: Lease, token: str, *texts: str, rank: int = 0) -> None:
    store.logs.add(lease, [LogLines(attempt=token, rank=rank, text=text) for text in texts])


def ids(text: str) -> list[int]:
    return [int(line.removeprefix("id: ")) for line in text.splitlines() if line.startswith("id: ")]


def test_pages_of_parts(client: TestClient, store: Store, lease: Lease, token: str) -> None:
    tell(store, lease, token, "a\n", "b\n", "c\n")
    tell(store, lease, token, "other\n", rank=1)
    path = f"/v1/jobs/{lease.job_id}/trials/0/logs"
    page = client.get(path, params={"after": 1, "limit": 2}).json()
    assert [(part["sequence"], part["attempt"], part["rank"], part["text"]) for part in page["items"]] == [
        (2, 1, 0, "b\n"), (3, 1, 0, "c\n"),
    ]  # fmt: skip
    assert page["next"] == 3
    assert client.get(path, params={"after": 4}).json() == {"items": [], "next": 4}
    assert [part["text"] for part in client.get(path, params={"rank": 1}).json()["items"]] == ["other\n"]
    assert client.get(path, params={"attempt": 2}).json()["items"] == []


def test_plain_text_is_what_was_printed(client: TestClient, store: Store, lease: Lease, token: str) -> None:
    tell(store, lease, token, "<script>alert('ä')</script>\n", "last\n")
    path = f"/v1/jobs/{lease.job_id}/trials/0/logs/text"
    answer = client.get(path)
    assert answer.text == "[rank 0] <script>alert('ä')</script>\n[rank 0] last\n"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get(path, params={"tail": 1, "rank": 0}).text == "last\n"


def test_plain_text_is_bounded(client: TestClient, store: Store, lease: Lease, token: str, monkeypatch) -> None:
    monkeypatch.setattr("api.routes.logs.MOST_BYTES", 100)
    tell(store, lease, token, *(f"{number:08}\n" for number in range(50)))
    path = f"/v1/jobs/{lease.job_id}/trials/0/logs/text"
    first, *lines = client.get(path, params={"rank": 0}).text.splitlines()
    assert first == "--- 351 bytes left out: GET …/logs has all, in pages ---"
    assert lines == [f"{number:08}" for number in range(39, 50)]
    assert client.get(path, params={"rank": 0, "tail": 2}).text == "00000048\n00000049\n"
    assert client.get(path, params={"rank": 0, "tail": 0}).text == ""


@pytest.mark.parametrize("kind", ["", "/text", "/stream"])
def test_a_trial_that_is_not_there(client: TestClient, lease: Lease, kind: str) -> None:
    told = problem_of(client.get(f"/v1/jobs/{lease.job_id}/trials/5/logs{kind}"), 404)["detail"]
    assert told.startswith(f"number: job {lease.job_id} has no trial 5; list the trials")


def test_a_stream_goes_over_all_attempts_to_the_end_of_the_trial(client: TestClient, store: Store, lease: Lease) -> None:
    def work() -> None:
        for outcome, retry in ((Outcome.TIMEOUT, True), (Outcome.OK, False)):
            token = store.attempts.start(lease, 0).token
            for number in range(5):
                tell(store, lease, token, f"{number}\n")
                time.sleep(0.02)
            store.attempts.finish(lease, TrialResult(attempt=token, outcome=outcome), retry)

    path = f"/v1/jobs/{lease.job_id}/trials/0/logs/stream"
    worker = threading.Thread(target=work)
    worker.start()
    answer = client.get(path)
    worker.join()
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert ids(answer.text) == list(range(1, 11))
    assert answer.text.count("event: log\n") == 10
    assert ids(client.get(path, headers={"Last-Event-ID": "8"}).text) == [9, 10]
    again = client.get(path, headers={"Last-Event-ID": "10"})
    assert (again.status_code, again.content) == (204, b"")


def test_parts_that_are_removed_meanwhile_hold_up_nobody(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = store.jobs.acquire(store.jobs.create({}).id, current_owner())
    store.trials.add(lease, TrialConfig(), Purpose.SEARCH)
    token = store.attempts.start(lease, 0).token
    reads: list[str] = []
    for name in ("of", "news"):
        real: Callable = getattr(store.logs, name)
        monkeypatch.setattr(store.logs, name, lambda *asked, name=name, real=real: reads.append(name) or real(*asked))
    key = (lease.job_id, 0)

    async def follow(hub: LogHub) -> list[int]:
        return ids(b"".join([part async for part in hub.stream(key, 0, 0)]).decode())

    async def run() -> list[list[int]]:
        hub = LogHub(store, poll_seconds=0.02)
        streams = [asyncio.create_task(follow(hub)) for _ in range(20)]
        for _ in range(8):  # more than is kept: parts between head and tail are gone before they are looked for
            await asyncio.to_thread(tell, store, lease, token, *(["x" * 16_000 + "\n"] * 30))
        await asyncio.to_thread(store.attempts.finish, lease, TrialResult(attempt=token, outcome=Outcome.OK))
        return await asyncio.wait_for(asyncio.gather(*streams), 30)

    found = asyncio.run(run())
    kept = [part.sequence for part in store.logs.of(lease.job_id, 0)]
    for sequences in found:
        assert sequences == sorted(set(sequences))
        assert sequences[-1] == 240
        assert set(kept) <= set(sequences)
    assert reads.count("of") < 200, "each stream read the database by itself"


def test_what_runs_now(client: TestClient, store: Store, lease: Lease, token: str) -> None:
    path = f"/v1/jobs/{lease.job_id}"
    assert client.get(f"{path}/progress").json() == {"items": []}
    store.logs.add(lease, [], [Progress(attempt=token, phase="measure", step=3, samples_per_second=float("nan"))])
    (sign,) = client.get(f"{path}/progress").json()["items"]
    assert {**sign, "time": ""} == {
        "trial": 0, "attempt": 1, "phase": "measure", "step": 3, "samples_per_second": None, "message": "", "time": "",
    }  # fmt: skip


def test_live_events_tell_what_runs_to_who_asks_for_it(
    client: TestClient, store: Store, lease: Lease, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, hub = threading.Event(), client.app.state.hub  # type: ignore[attr-defined]
    real = hub.stream

    async def watched(*asked: object) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(real(*asked)) as parts:
            async for part in parts:
                if b"event: progress" in part:
                    told.set()
                yield part

    monkeypatch.setattr(hub, "stream", watched)

    def work() -> None:
        for step in range(3):
            store.logs.add(lease, [], [Progress(attempt=token, phase="measure", step=step)])
            assert told.wait(120)
        store.attempts.finish(lease, TrialResult(attempt=token, outcome=Outcome.OK))
        store.jobs.release(lease, JobState.SUCCEEDED, "", "")

    texts: dict[str, str] = {}

    def follow(progress: str) -> None:
        texts[progress] = client.get(f"/v1/jobs/{lease.job_id}/events/stream", params={"progress": progress}).text

    threads = [threading.Thread(target=work), *(threading.Thread(target=follow, args=(given,)) for given in ("true", "false"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    version = store.jobs.get(lease.job_id).version
    assert ids(texts["true"]) == ids(texts["false"]) == list(range(1, version + 1))
    assert 1 <= texts["true"].count("event: progress\ndata: {") <= 3
    assert "event: progress" not in texts["false"]
