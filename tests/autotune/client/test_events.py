"""Live events: each once and in order, over broken connections and killed servers."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import served

from autotune import Client
from autotune.client import JobEvent, ServiceError, UnreachableError, events
from autotune.client.transport import decode
from search_spaces.outcome import JobState
from storage.leases import current_owner
from storage.store import Store
from tests.ports import free_port

JOB = "20300131-120000-abcd"


def message(sequence: int) -> bytes:
    data = json.dumps({"sequence": sequence, "time": "2030-01-31T12:00:00Z", "kind": "note", "payload": {"text": "a\nb"}})
    return f"id: {sequence}\nevent: note\ndata: {data}\n\n".encode()


def followed(*streams: bytes, after: int = 0) -> tuple[list[int], list[str]]:
    """The events of a service whose streams end so; and from where each stream was asked for."""
    asked: list[str] = []

    def answer(request: served.Request) -> served.Answer:
        asked.append(request.headers["last-event-id"])
        left = streams[len(asked) - 1 :]
        return (200, served.STREAM, left[0]) if left else (204, served.STREAM, b"")

    with served.answering(answer) as url, Client(url) as client:
        return [event.sequence for event in client.events(JOB, after)], asked


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PAUSE_SECONDS", 0.02)


def test_a_stream_that_ends_is_asked_for_again_from_where_it_was() -> None:
    retry, life = b"retry: 1000\n\n", b": still here\n\n"
    found, asked = followed(retry + message(1) + life + message(2), retry, life + message(3))
    assert found == [1, 2, 3]
    assert asked == ["0", "2", "2", "3"]


def test_half_an_event_is_none() -> None:
    found, asked = followed(message(1) + message(2)[:-1], message(2) + message(3)[:20], message(3))
    assert found == [1, 2, 3]
    assert asked == ["0", "1", "2", "3"]


def test_what_was_given_is_not_given_again() -> None:
    assert followed(message(1) + message(1) + message(2), message(1) + message(2) + message(3))[0] == [1, 2, 3]


def test_what_was_left_out_is_asked_for() -> None:
    found, asked = followed(message(5) + message(7), message(6) + message(7), after=4)
    assert found == [5, 6, 7]
    assert asked == ["4", "5", "7"]


def test_what_is_not_there_is_told() -> None:
    with pytest.raises(ServiceError, match="events: 1 is missing before 2; ask who runs the service"):
        followed(message(2))


@pytest.mark.parametrize("data", ["words", "[]", '{"sequence": "x"}'])
def test_what_is_no_event_is_told(data: str) -> None:
    with pytest.raises(ServiceError, match=r"events: .* cannot be read .*; use the client of the service's version"):
        followed(f"id: 1\ndata: {data}\n\n".encode())


def test_a_service_that_stays_away_is_told_of() -> None:
    with (
        Client(f"http://127.0.0.1:{free_port()}", outage_seconds=0.3) as client,
        pytest.raises(UnreachableError, match="gives no answer"),
    ):
        next(client.events(JOB))


@pytest.mark.prove
def test_a_stream_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.client.transport.SILENCE_SECONDS", 2.0)
    asked: list[str] = []
    again = threading.Event()

    def answer(request: served.Request) -> served.Answer:
        asked.append(request.headers["last-event-id"])
        if len(asked) == 1:
            again.wait(60)
        again.set()
        return (200, served.STREAM, message(1)) if request.headers["last-event-id"] == "0" else (204, served.STREAM, b"")

    with served.answering(answer) as url, Client(url) as client:
        assert [event.sequence for event in client.events(JOB)] == [1]
    assert (asked[:2], asked[-1]) == (["0", "0"], "1")


@pytest.mark.nightly
def test_a_server_that_is_killed_and_started_again(tmp_path: Path, store: Store) -> None:
    """Killed without warning while events come, and ended in good order: who follows misses nothing and sees nothing twice."""
    port = free_port()
    process = served.start_service(tmp_path, port)
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            job = client.submit("llama-tiny", trials=3)
            found: list[JobEvent] = []
            follower = threading.Thread(target=lambda: found.extend(_noted(client.events(job), found)))
            follower.start()
            lease = store.queue.claim(current_owner())
            assert lease is not None
            for number in (signal.SIGKILL, signal.SIGTERM):
                before = len(found)
                _tell(store, lease, 20)
                served.until(lambda: len(found) >= before + 20)  # noqa: B023  called at once
                os.kill(process.pid, number)
                process.communicate()
                _tell(store, lease, 20)
                process = served.start_service(tmp_path, port)
            store.jobs.release(lease, JobState.SUCCEEDED, "BUDGET", "")
            follower.join(30)
            assert not follower.is_alive()
    finally:
        served.end(process)
    count = store.jobs.get(job.id).version
    assert count == 83
    assert [event.sequence for event in found] == list(range(1, count + 1))
    assert found[-1].kind == "job_released"


def _noted(events: "Callable[..., object] | object", found: list[JobEvent]) -> list[JobEvent]:
    """Keep each event as it comes, so that the test can wait for it."""
    for event in events:  # type: ignore[attr-defined]
        found.append(event)
    return []


def _tell(store: Store, lease: object, count: int) -> None:
    for number in range(count):
        store.events.add(lease, "note", {"number": number})  # type: ignore[arg-type]


def test_an_event_has_its_time_with_its_zone() -> None:
    event = decode(JobEvent, json.loads(message(1).split(b"data: ")[1]))
    assert event.time.utcoffset() is not None
