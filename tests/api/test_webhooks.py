"""Webhooks: signed, tried again, logged; and none of them reaches what is not on the public internet."""

import base64
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from starlette.testclient import TestClient

from api import deliverer
from api.deliverer import WAITS, CheckedTarget, after, checked_target, networks
from api.settings import Settings
from autotune.errors import RequestError
from search_spaces.shared_records import DeliveryTry
from storage.service_records import DeliveryRecord, DeliveryState
from storage.store import Store
from tests.api.conftest import problem_of, submit


class Receiver:
    """A server that keeps what it was sent, and answers with the statuses that it is told to, then 204."""

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        self.came = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with receiver.came:
                    receiver.received.append(({k.lower(): v for k, v in self.headers.items()}, body))
                    status = receiver.statuses.pop(0) if receiver.statuses else 204
                    receiver.came.notify_all()
                self.send_response(status)
                self.send_header("Location", "http://169.254.169.254/")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?x=1"

    def wait_for(self, count: int, seconds: float = 120.0) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.received) >= count, seconds)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture
def local(serve: Callable[..., TestClient], monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A service that may call this machine, and is in a hurry."""
    monkeypatch.setattr(deliverer, "WAITS", (0.05, 0.05, 0.05))
    monkeypatch.setattr(deliverer, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(deliverer.Deliverer.__init__, "__defaults__", (0.05,))
    return serve(webhook_networks=("127.0.0.0/8",))


def end_a_job(client: TestClient) -> str:
    job_id = submit(client)["id"]
    assert client.post(f"/v1/jobs/{job_id}/cancel").status_code == 202
    return str(job_id)


def logged(client: TestClient, webhook_id: str, state: str) -> dict[str, Any]:
    """The one delivery of a webhook, when it has come to that state."""
    until = time.monotonic() + 120
    while True:
        (item,) = client.get(f"/v1/webhooks/{webhook_id}/deliveries").json()["items"]
        if item["state"] == state:
            return dict(item)
        assert time.monotonic() < until, item
        time.sleep(0.02)


def test_the_end_of_a_job_is_told_and_signed(local: TestClient, receiver: Receiver) -> None:
    made = local.post("/v1/webhooks", json={"url": receiver.url})
    assert made.status_code == 201, made.text
    job_id = end_a_job(local)
    receiver.wait_for(1)
    headers, body = receiver.received[0]
    told = json.loads(body)
    assert told["type"] == "job.ended"
    assert told["data"] == {"job": job_id, "state": "CANCELLED", "reason": "cancelled", "message": "cancelled on request"}
    # As https://www.standardwebhooks.com says, written down anew.
    key = base64.b64decode(made.json()["secret"].removeprefix("whsec_"))
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    assert headers["webhook-signature"] == "v1," + base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
    assert abs(time.time() - int(headers["webhook-timestamp"])) < 60
    done = logged(local, made.json()["id"], "delivered")
    assert (done["job"], done["id"], done["due"], [t["status"] for t in done["tries"]]) == (
        job_id, headers["webhook-id"], None, [204],
    )  # fmt: skip


def test_what_fails_is_tried_again_under_the_same_id_and_redirects_lead_nowhere(local: TestClient, receiver: Receiver) -> None:
    receiver.statuses = [500, 302]
    webhook = local.post("/v1/webhooks", json={"url": receiver.url}).json()
    end_a_job(local)
    done = logged(local, webhook["id"], "delivered")
    assert [item["status"] for item in done["tries"]] == [500, 302, 204]
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 1


@pytest.mark.prove
def test_a_receiver_that_never_answers_well_is_given_up(local: TestClient, receiver: Receiver) -> None:
    receiver.statuses = [500] * 9
    webhook = local.post("/v1/webhooks", json={"url": receiver.url}).json()
    end_a_job(local)
    assert len(logged(local, webhook["id"], "given_up")["tries"]) == 4
    receiver.statuses = [410]
    other = local.post("/v1/webhooks", json={"url": receiver.url}).json()
    local.delete(f"/v1/webhooks/{webhook['id']}")
    end_a_job(local)
    assert [item["status"] for item in logged(local, other["id"], "given_up")["tries"]] == [410]


def test_a_try_that_is_over_before_it_is_connected_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        there = CheckedTarget(scheme="http", host="127.0.0.1", port=silent.getsockname()[1], path="/", address="127.0.0.1")
        connection = deliverer._Pinned(there)
        connection.give_up()
        with closing(connection), pytest.raises(TimeoutError):
            connection.request("POST", "/")


@pytest.mark.prove
def test_a_receiver_that_is_not_there_or_trickles_is_an_entry_in_the_log(
    local: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliverer, "WAITS", ())
    monkeypatch.setattr(deliverer, "WHOLE_SECONDS", 0.3)
    monkeypatch.setattr(deliverer, "TIMEOUT_SECONDS", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        webhook = local.post("/v1/webhooks", json={"url": f"http://127.0.0.1:{port}/"}).json()
        end_a_job(local)
        (trickled,) = logged(local, webhook["id"], "given_up")["tries"]
    assert (trickled["status"], bool(trickled["error"])) == (None, True)
    assert 0.2 < trickled["seconds"] < 30
    local.delete(f"/v1/webhooks/{webhook['id']}")
    gone = local.post("/v1/webhooks", json={"url": f"http://127.0.0.1:{port}/"}).json()
    end_a_job(local)
    assert logged(local, gone["id"], "given_up")["tries"][0]["error"] == "ConnectionRefusedError"


PRIVATE = [
    "http://127.0.0.1/", "http://localhost:8000/", "http://0.0.0.0/", "http://10.1.2.3/", "http://192.168.0.1/", "http://[::1]/",
    "http://172.16.0.9/", "http://169.254.169.254/latest/meta-data/", "http://[fd00::1]/", "http://[fe80::1%25lo]/",
    "http://[::ffff:127.0.0.1]/", "http://[::ffff:10.0.0.1]/", "http://2130706433/", "http://0x7f.1/", "http://127.1/",
    "http://0177.0.0.1/", "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://100.64.0.1/", "http://224.0.0.1/",
    "http://255.255.255.255/", "http://[::]/", "http://198.18.0.1/",
]  # fmt: skip
NO_URLS = [
    "ftp://8.8.8.8/", "file:///etc/passwd", "http://", "http:///x", "http://user:word@8.8.8.8/", "http://8.8.8.8:99999/",
    "http://8.8.8.8:0/", "http://8.8.8.8/\r\nX: y", "http://8.8.8.8/a b", "http://8.8.8.8/#x", "gopher://8.8.8.8/", "8.8.8.8",
    "http://nobody.invalid/", "http://8.8.8.8/é", "http://[::1", "//8.8.8.8/", "https://8.8.8.8/" + "a" * 2000, "",
]  # fmt: skip


@pytest.mark.prove(every=5)
@pytest.mark.parametrize("url", PRIVATE + NO_URLS)
def test_a_target_that_is_private_or_none_is_refused_and_nothing_written(
    refusing: TestClient, untouched: Store, url: str
) -> None:
    problem = problem_of(refusing.post("/v1/webhooks", json={"url": url}), 422)
    assert "url" in problem["errors"][0]["field"]
    assert untouched.webhooks.of() == []


@pytest.mark.prove
def test_a_name_that_turns_private_later_is_not_called(
    serve: Callable[..., TestClient], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["93.184.216.34"])

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers, "127.0.0.1"), port))]

    monkeypatch.setattr("api.deliverer.socket.getaddrinfo", resolve)
    monkeypatch.setattr(deliverer, "WAITS", ())
    client = serve()
    made = client.post("/v1/webhooks", json={"url": f"http://rebound.example:{receiver.server.server_port}/"})
    assert made.status_code == 201, made.text
    end_a_job(client)
    (tried,) = logged(client, made.json()["id"], "given_up")["tries"]
    assert (tried["status"], tried["error"]) == (None, "is not on the public internet")
    assert receiver.received == []


def test_the_address_that_was_checked_is_the_one_that_is_called(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr("api.deliverer.socket.getaddrinfo", resolve)
    target = checked_target(f"http://name.example:{receiver.server.server_port}/", networks(["127.0.0.0/8"]))
    assert (target.host, target.address, asked) == ("name.example", "127.0.0.1", ["name.example"])


def test_owners_see_their_own_webhooks(serve: Callable[..., TestClient], store: Store) -> None:
    client = serve(require_keys=True)
    scopes = {"anna": ("read", "submit"), "bert": ("read", "submit"), "carl": ("read",), "root": ("admin",)}
    keys = {name: {"Authorization": f"Bearer {store.keys.create(name, given)[1]}"} for name, given in scopes.items()}
    body = {"url": "https://8.8.8.8/hook"}
    problem_of(client.post("/v1/webhooks", json=body), 401)
    problem_of(client.post("/v1/webhooks", json=body, headers=keys["carl"]), 403)
    hers = client.post("/v1/webhooks", json=body, headers=keys["anna"]).json()
    assert client.get("/v1/webhooks", headers=keys["bert"]).json() == {"items": []}
    problem_of(client.get(f"/v1/webhooks/{hers['id']}/deliveries", headers=keys["bert"]), 404)
    problem_of(client.delete(f"/v1/webhooks/{hers['id']}", headers=keys["bert"]), 404)
    listed = client.get("/v1/webhooks", headers=keys["root"])
    assert [item["id"] for item in listed.json()["items"]] == [hers["id"]]
    assert hers["secret"] not in listed.text
    assert client.delete(f"/v1/webhooks/{hers['id']}", headers=keys["anna"]).status_code == 204


def test_waits_grow_and_end() -> None:
    @contextmanager
    def tries(count: int) -> Iterator[DeliveryRecord]:
        failed = DeliveryTry(time=None, seconds=1.0, status=500, error="")  # type: ignore[arg-type]
        values: dict[str, Any] = dict.fromkeys(("id", "webhook", "job_id", "created", "due", "payload"))
        yield DeliveryRecord(**values, state=DeliveryState.PENDING, tries=(failed,) * count)

    failed = DeliveryTry(time=None, seconds=1.0, status=None, error="timed out")  # type: ignore[arg-type]
    waits = []
    for count in range(len(WAITS)):
        with tries(count) as item:
            state, wait = after(item, failed)
            assert state is DeliveryState.PENDING
            waits.append(wait)
    assert waits == sorted(waits)
    assert sum(waits) > 86400
    with tries(len(WAITS)) as item:
        assert after(item, failed)[0] is DeliveryState.GIVEN_UP


def test_a_network_that_is_none_is_refused_when_the_server_starts() -> None:
    with pytest.raises(RequestError, match="webhook_network"):
        networks(["10.0.0.1/8"])
    assert Settings(database_url="x").webhook_networks == ()
