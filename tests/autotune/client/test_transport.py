"""What is sent again and what is not, what is told where the service does not answer as it should, and where keys show."""

import json
import logging
import time
import traceback
from pathlib import Path

import pytest
import served

from autotune import Client
from autotune.client import (
    ConflictError,
    ForbiddenError,
    Job,
    ServiceError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
)
from autotune.client.transport import decode
from autotune.errors import RequestError
from storage.store import Store
from tests.ports import free_port

JOB = "20300131-120000-abcd"
NAMES = (200, served.JSON, b'{"items": ["one"]}')


def test_a_submission_whose_answer_is_lost_opens_one_job(url: str, store: Store) -> None:
    sent: list[served.Request] = []

    def answer(request: served.Request) -> served.Answer | None:
        sent.append(request)
        told = served.forwarded(request, url)
        return told if len(sent) == 3 else None  # the service has opened it, and the connection breaks

    with served.answering(answer) as broken, Client(broken) as client:
        job = client.submit("llama-tiny", trials=3)
    assert [request.method for request in sent] == ["POST"] * 3
    assert len({request.headers["idempotency-key"] for request in sent}) == 1
    assert [record.id for record in store.jobs.newest()] == [job.id]


@pytest.mark.prove
@pytest.mark.parametrize("verb", ["pause", "stop", "cancel", "clone"])
def test_what_is_asked_of_a_job_may_be_asked_again(url: str, store: Store, verb: str) -> None:
    sent: list[served.Request] = []

    def answer(request: served.Request) -> served.Answer | None:
        sent.append(request)
        told = served.forwarded(request, url)
        return told if len(sent) == 2 else None

    with Client(url) as client, served.answering(answer) as broken, Client(broken) as again:
        job = client.submit("llama-tiny", trials=3)
        asked = getattr(again, verb)(job)
        assert asked == client.job(asked)
    assert len(sent) == 2
    assert len(store.jobs.newest()) == (2 if verb == "clone" else 1)


def test_a_change_of_one_version_is_not_sent_twice() -> None:
    sent: list[served.Request] = []
    with served.answering(lambda request: sent.append(request)) as url, Client(url) as client:
        with pytest.raises(UnreachableError, match="gives no answer"):
            client.extend(_job(), trials=5)
        assert len(sent) == 1
        assert sent[0].headers["if-match"] == '"4-7"'
        with pytest.raises(UnreachableError):
            client.extend(JOB, trials=5)
    assert len(sent) == 6, "without a version it may be sent again"
    assert "if-match" not in sent[1].headers


@pytest.mark.prove
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_service_that_cannot_now_is_asked_again(status: int) -> None:
    sent: list[float] = []

    def answer(_request: served.Request) -> served.Answer:
        sent.append(time.monotonic())
        wait = {"Retry-After": "1"} if status == 429 else {}
        return (status, served.PROBLEM | wait, b'{"detail": "too much"}') if len(sent) == 1 else NAMES

    with served.answering(answer) as url, Client(url) as client:
        assert client.models() == ("one",)
    assert sent[1] - sent[0] >= (1.0 if status == 429 else 0.04)


def test_a_service_that_cannot_for_long_is_told_of() -> None:
    sent: list[served.Request] = []

    def answer(request: served.Request) -> served.Answer:
        sent.append(request)
        return 503, served.PROBLEM, b'{"detail": "the database cannot be used; try again"}'

    with served.answering(answer) as url, Client(url) as client, pytest.raises(UnavailableError) as found:
        client.models()
    assert str(found.value) == "the database cannot be used; try again"
    assert isinstance(found.value, ConnectionError)
    assert len(sent) == 5


def test_what_asks_to_wait_too_long_is_not_waited_for() -> None:
    answer = (429, served.PROBLEM | {"Retry-After": "3600"}, b'{"detail": "too many requests; try again in 3600 s"}')
    with served.answering(lambda _: answer) as url, Client(url) as client, pytest.raises(UnavailableError, match="in 3600 s"):
        client.models()


def test_nobody_listens() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url) as client, pytest.raises(UnreachableError) as found:
        client.models()
    assert str(found.value).startswith(f"url: {url} gives no answer (")
    assert str(found.value).endswith("); start `autotune serve`, or check AUTOTUNE_URL or --url")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, {"Content-Type": "text/html"}, b"<html>"), "answers, but is no autotune service; check"),
        ((404, {"Content-Type": "text/html"}, b"<html>"), "answers 404 Not Found, but not as an autotune service; check"),
        ((302, {"Location": "https://elsewhere"}, b""), "answers 302 Found, but not as an autotune service; check"),
        ((200, served.JSON, b"<html>"), "cannot be read .*; use the client of the service's version"),
        ((200, served.JSON, b'{"things": []}'), "cannot be read .KeyError: 'items'.; use the client"),
        ((200, served.JSON, b'{"items": [1]}'), "cannot be read .TypeError: 1 is not str.; use the client"),
        ((200, served.JSON, b"[]"), "cannot be read .*; use the client"),
        ((500, served.PROBLEM, b'{"detail": "the server failed; its log has the reason"}'), "^the server failed; its log"),
        ((500, served.PROBLEM, b"words"), "answers 500 Internal Server Error, but not as"),
    ],
)
def test_what_is_no_answer_of_ours(answer: served.Answer, says: str) -> None:
    with served.answering(lambda _: answer) as url, Client(url) as client, pytest.raises(ServiceError, match=says) as found:
        client.models()
    assert type(found.value) is ServiceError


def test_an_answer_does_not_command_the_terminal() -> None:
    body = json.dumps({"detail": "a\x1b[2Jb\n\tc" + "d" * 5000}).encode()
    answer = (409, served.PROBLEM, body)
    with served.answering(lambda _: answer) as url, Client(url) as client, pytest.raises(ConflictError) as found:
        client.pause(JOB)
    assert str(found.value).startswith("a [2Jb cdd")
    assert len(str(found.value)) == 1000


def test_a_field_of_a_newer_service_is_left_out() -> None:
    body = json.dumps({"items": ["one"], "newer": 1}).encode()
    with served.answering(lambda _: (200, served.JSON, body)) as url, Client(url) as client:
        assert client.spaces() == ("one",)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("127.0.0.1:8000", "url: '127.0.0.1:8000' is no address of a service; give one such as http://127.0.0.1:8000"),
        ("ftp://host", "is no address of a service; give"),
        ("http://", "is no address of a service; give"),
        ("http://host:port", "url: is no address"),
        ("http://[::1", "url: is no address"),
        ("http://host/?a=b", "has more than an address; give"),
        ("http://anna:secret@host", "url: holds a user or a password; leave them out, and give an API key"),
    ],
)
def test_what_is_no_address(url: str, says: str) -> None:
    with pytest.raises(RequestError, match=says.replace("[", "\\[")) as found:
        Client(url)
    assert "secret" not in str(found.value)


class TestKeys:
    def test_without_one(self, store: Store, tmp_path: Path) -> None:
        with served.service(str(tmp_path / "jobs.db"), require_keys=True) as url, Client(url) as client:
            with pytest.raises(UnauthorizedError) as found:
                client.models()
            assert str(found.value) == (
                f"api_key: {url} asks for an API key; set AUTOTUNE_API_KEY, or make one with `autotune keys create` where the "
                "service runs"
            )
            assert isinstance(found.value, PermissionError)

    def test_one_that_is_not_taken(self, store: Store, tmp_path: Path) -> None:
        key, text = store.keys.create("anna", {"read"})
        store.keys.revoke(key.id)
        with served.service(str(tmp_path / "jobs.db"), require_keys=True) as url, Client(url, text) as client:
            with pytest.raises(UnauthorizedError, match=r"does not take it \(unknown, revoked or expired\); make one with"):
                client.models()
            with pytest.raises(UnauthorizedError):
                next(client.events(JOB))

    def test_one_that_lacks_a_scope(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        _, text = store.keys.create("anna", {"read"})
        monkeypatch.setenv("AUTOTUNE_API_KEY", f"{text}\n")
        caplog.set_level(logging.DEBUG)
        with served.service(str(tmp_path / "jobs.db"), require_keys=True) as url, Client(url) as client:
            assert "llama-tiny" in client.models()
            with pytest.raises(ForbiddenError, match="lacks the scope submit; use a key that has it") as found:
                client.submit("llama-tiny")
        told = "".join(traceback.format_exception(found.value))
        for place in (caplog.text, told, repr(client), repr(client._transport._http.headers), str(vars(client))):
            assert text not in place
            assert text[-20:] not in place
        assert "send_request_headers" in caplog.text, "the log has nothing of the requests"

    @pytest.mark.parametrize("key", ["two words", "schlüssel", "\x00secret", "a\nsecret"])
    def test_what_is_none(self, key: str) -> None:
        with pytest.raises(RequestError) as found:
            Client("http://127.0.0.1:1", key)
        assert str(found.value) == "api_key: is no API key; give the text that `autotune keys create` printed"

    def test_none_is_sent_elsewhere(self) -> None:
        seen: list[served.Request] = []

        def answer(request: served.Request) -> served.Answer:
            seen.append(request)
            return NAMES

        with served.answering(answer) as elsewhere:
            redirect = (307, {"Location": f"{elsewhere}/v1/models"}, b"")
            with served.answering(lambda _: redirect) as url, Client(url, "at_key") as client, pytest.raises(ServiceError):
                client.models()
        assert seen == []


def _job() -> Job:
    when = "2030-01-31T12:00:00Z"
    texts = dict.fromkeys(("id", "state", "reason", "message", "model", "submitter"), JOB)
    numbers = {"priority": 0, "active_seconds": 7, "version": 4}
    return decode(Job, {**texts, **numbers, "created": when, "updated": when, "answer": None, "request": {}, "assumed": []})
