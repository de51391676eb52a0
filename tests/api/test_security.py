"""Who may do what, and what is refused: nothing of a refused request is written."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from api.app import create_app
from api.limits import Rates
from api.settings import Settings
from autotune.errors import RequestError
from storage.store import Store, open_store
from tests.api.conftest import BASE, REQUEST, measure, problem_of, service, submit


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def test_without_a_key_nothing_is_told(serve, store: Store) -> None:
    client = serve(require_keys=True)
    _, expired = store.keys.create("anna", {"read"}, datetime.now(UTC) - timedelta(seconds=1))
    key, revoked = store.keys.create("anna", {"read"})
    store.keys.revoke(key.id)
    for headers in ({}, bearer("at_000000000000_x"), bearer(expired), bearer(revoked), {"Authorization": "Basic YTpi"}):
        for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/models"), ("GET", "/metrics")):
            answer = client.request(method, path, headers=headers, json=REQUEST if method == "POST" else None)
            problem_of(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert client.get("/livez").status_code == 200


def test_scopes(serve, store: Store) -> None:
    client = serve(require_keys=True)
    reader, submitter = (bearer(store.keys.create("anna", scopes)[1]) for scopes in ({"read"}, {"read", "submit"}))
    problem_of(client.post("/v1/jobs", json=REQUEST, headers=reader), 403)
    job_id = submit(client, submitter)["id"]
    assert client.get(f"/v1/jobs/{job_id}", headers=reader).status_code == 200
    for verb in ("pause", "resume", "stop", "cancel", "clone"):
        problem_of(client.post(f"/v1/jobs/{job_id}/{verb}", headers=reader), 403)
    problem_of(client.patch(f"/v1/jobs/{job_id}", json={"trials": 4}, headers=reader), 403)
    assert store.jobs.get(job_id).state == "QUEUED"


@pytest.mark.prove
def test_jobs_of_another_owner_are_not_there(serve, store: Store) -> None:
    client = serve(require_keys=True)
    anna, ben, admin = (
        bearer(store.keys.create(owner, scopes)[1])
        for owner, scopes in (("anna", {"read", "submit"}), ("ben", {"read", "submit"}), ("root", {"admin"}))
    )
    job_id = submit(client, anna)["id"]
    measure(store, job_id)
    before = store.jobs.get(job_id)
    logs = ("/progress", "/trials/0/logs", "/trials/0/logs/text", "/trials/0/logs/stream")
    for path in (
        "",
        "/trials",
        "/trials/0/attempts",
        "/best",
        "/export",
        "/events",
        "/events/stream",
        "/points",
        "/figures",
        "/figures/timeline",
        "/trials/0/parts",
        *logs,
    ):
        missing = problem_of(client.get(f"/v1/jobs/{job_id}{path}", headers=ben), 404)["detail"]
        unknown = problem_of(client.get(f"/v1/jobs/20300101-000000-aaaa{path}", headers=ben), 404)["detail"]
        assert missing.replace(job_id, "") == unknown.replace("20300101-000000-aaaa", "")
    for verb in ("pause", "resume", "stop", "cancel", "clone"):
        problem_of(client.post(f"/v1/jobs/{job_id}/{verb}", headers=ben), 404)
    assert client.get("/v1/jobs", headers=ben).json()["items"] == []
    assert client.get("/v1/jobs", headers=ben, params={"submitter": "anna"}).json()["items"] == []
    problem_of(client.get("/v1/jobs", headers=ben, params={"cursor": job_id}), 404)
    assert store.jobs.get(job_id) == before
    assert [job["id"] for job in client.get("/v1/jobs", headers=admin).json()["items"]] == [job_id]
    assert client.post(f"/v1/jobs/{job_id}/cancel", headers=admin).json()["state"] == "CANCELLED"


def test_beyond_loopback_keys_are_asked_for() -> None:
    for host in ("0.0.0.0", "10.0.0.1", "::", "example.org"):
        with pytest.raises(RequestError, match="autotune keys create"):
            Settings(database_url="x", host=host, require_keys=False)
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        Settings(database_url="x", host=host, require_keys=False)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost@evil.example", "evil.example:8000"])
def test_a_name_that_was_made_to_point_here_is_refused(refusing: TestClient, host: str) -> None:
    problem_of(refusing.get("/v1/jobs", headers={"Host": host}), 421)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "[::1]:8000"])
def test_names_of_loopback_are_ours(refusing: TestClient, host: str) -> None:
    assert refusing.get("/v1/jobs", headers={"Host": host}).status_code == 200


def test_a_page_of_another_site_is_refused(client: TestClient) -> None:
    for origin in ("https://evil.example", "null", "http://127.0.0.1:9999"):
        problem_of(client.post("/v1/jobs", json=REQUEST, headers={"Origin": origin}), 403)
    submit(client, {"Origin": "http://127.0.0.1:8000"})
    assert len(client.get("/v1/jobs").json()["items"]) == 1


@pytest.fixture(scope="module")
def allowing(untouched_database: str) -> Iterator[TestClient]:
    """A client of a service that allows one factory."""
    with service(untouched_database, factories=("mine:other",)) as client:
        yield client


@pytest.mark.prove(every=3)
@pytest.mark.parametrize(
    "model",
    [
        "os:system", "subprocess:run", "mine:build", "../../etc/passwd", "/etc/passwd", "~/config.json", "config.json",
        "./x.json", "llama-tiny/../../x", "file:///etc/passwd", "llama-tiny\x00", "a" * 201, "", "mine:build;evil",
    ],
)  # fmt: skip
def test_no_request_names_a_path_or_code_of_the_server(allowing: TestClient, untouched: Store, model: str) -> None:
    document = problem_of(allowing.post("/v1/jobs", json=REQUEST | {"model": model}), 422)
    assert "root:" not in json.dumps(document)
    assert untouched.jobs.newest() == []


@pytest.mark.prove(every=3)
@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": "/etc/hosts"}, {"cluster": "../x.toml"}, {"cluster": "ray"}, {"space": "/etc/hosts"}, {"space": "x.toml"},
        {"data_path": "/etc/passwd"}, {"python_path": ["/tmp"]}, {"resolved_model": {}}, {"engine": "../x"},
        {"model": {"config": {"model_type": "llama"}, "path": "/etc"}}, {"model": {"name": "../x\x00", "config": {}}},
        {"baseline": "/etc/passwd"}, {"fidelity": {"max_steps": 10**9}}, {"environment_settings": ["LD_PRELOAD=/tmp/x.so"]},
        {"environment_settings": ["NCCL_NET_PLUGIN=/tmp/x.so"]}, {"environment_settings": ["NCCL_ALGO=Ring$(id)"]},
        {"environment_settings": ["MALLOC_ARENA_MAX=1\x00"]}, {"environment_settings": ["MALLOC_ARENA_MAX=1"] * 5},
        {"pins": {"environment": "PYTHONPATH=/tmp"}}, {"pins": {"environment": ["", "MALLOC_ARENA_MAX=1"]}},
        {"baseline": {"environment": "LD_PRELOAD=/tmp/x.so"}}, {"resolved_environments": ["LD_PRELOAD=/tmp/x.so"]},
    ],
    ids=str,
)  # fmt: skip
def test_nor_by_another_field(refusing: TestClient, untouched: Store, changes: dict) -> None:
    problem_of(refusing.post("/v1/jobs", json=REQUEST | changes), 422)
    assert untouched.jobs.newest() == []


def test_bodies_are_bounded(serve, store: Store) -> None:
    client = serve(body_bytes=2000, depth=8)
    problem_of(client.post("/v1/jobs", json=REQUEST | {"model": "x" * 3000}), 413)
    problem_of(
        client.post(
            "/v1/jobs", content=iter([b'{"model": "', b"x" * 3000, b'"}']), headers={"Content-Type": "application/json"}
        ),
        413,
    )
    deep = '{"model": ' + "[" * 500 + "]" * 500 + "}"
    problem_of(client.post("/v1/jobs", content=deep, headers={"Content-Type": "application/json"}), 400)
    problem_of(client.post("/v1/jobs", content="{", headers={"Content-Type": "application/json"}), 400)
    problem_of(client.post("/v1/jobs", content='{"trials": NaN}', headers={"Content-Type": "application/json"}), 400)
    problem_of(client.post("/v1/jobs", content=b"\xff\xfe", headers={"Content-Type": "application/json"}), 400)
    problem_of(client.post("/v1/jobs", content="model=x", headers={"Content-Type": "application/x-www-form-urlencoded"}), 415)
    problem_of(client.post("/v1/jobs", json=REQUEST, headers={"Content-Length": "9" * 30}), 413)
    assert store.jobs.newest() == []


def test_a_client_that_asks_too_often_waits() -> None:
    now = [0.0]
    rates = Rates(2.0, clock=lambda: now[0])
    assert [rates.wait("a") for _ in range(20)] == [0.0] * 20
    assert rates.wait("a") == pytest.approx(0.5)
    assert rates.wait("b") == 0.0
    now[0] += 0.5
    assert rates.wait("a") == 0.0
    assert rates.wait("a") > 0.0


def test_the_wait_is_told(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.guard.Rates", partial(Rates, clock=lambda: 0.0))
    client = serve(requests_per_second=0.1)
    assert client.get("/livez").status_code == 200
    refused = client.get("/livez")
    problem_of(refused, 429)
    assert int(refused.headers["retry-after"]) >= 1


def test_a_lost_database_is_a_problem_without_its_path(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    open_store(str(path)).close()
    app = create_app(Settings(database_url=str(path), require_keys=False))
    app.state.store.close()  # its next connection meets what stands there then
    path.write_bytes(b"no database any more" * 100)
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as client:
        assert str(path) not in json.dumps(problem_of(client.get("/v1/jobs"), 503))
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (503, "unavailable")
        assert str(path) not in ready.text
        assert "autotune_database_up 0.0" in client.get("/metrics").text


@pytest.mark.parametrize(
    "name", ["X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Anything", "Forwarded", "Via", "X-Real-IP"]
)
def test_without_keys_nothing_comes_through_a_proxy(refusing: TestClient, untouched: Store, name: str) -> None:
    """It would speak for whoever reaches it."""
    for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/")):
        refused = refusing.request(method, path, headers={name: "127.0.0.1"}, json=REQUEST if method == "POST" else None)
        assert "start the server with --keys" in problem_of(refused, 403)["detail"]
    assert untouched.jobs.newest() == []


@pytest.mark.prove
@pytest.mark.parametrize("keys", [False, True])
def test_another_sites_page_changes_nothing(serve, store: Store, keys: bool) -> None:
    client = serve(require_keys=keys)
    mine = bearer(store.keys.create("anna", {"read", "submit"})[1]) if keys else {}
    for site in ("cross-site", "same-site"):
        problem_of(client.post("/v1/jobs", json=REQUEST, headers=mine | {"Sec-Fetch-Site": site}), 403)
        assert client.get("/v1/jobs", headers=mine | {"Sec-Fetch-Site": site}).status_code == 200
    for site in ("same-origin", "none"):
        submit(client, mine | {"Sec-Fetch-Site": site})
    assert len(store.jobs.newest()) == 2


def test_a_trusted_proxy_is_an_address_and_needs_keys() -> None:
    with pytest.raises(RequestError, match="no API keys are required"):
        Settings(database_url="x", require_keys=False, trusted_proxies=("127.0.0.1",))
    with pytest.raises(RequestError, match="neither an address nor a network"):
        Settings(database_url="x", trusted_proxies=("proxy.example",))
    Settings(database_url="x", trusted_proxies=("127.0.0.1", "10.1.0.0/16", "::1"))


def test_one_key_has_one_rate_however_it_is_written(serve, store: Store) -> None:
    client = serve(require_keys=True, requests_per_second=1.0)
    key = store.keys.create("anna", {"read"})[1]
    ways = [f"{word}{' ' * spaces}{key}" for word in ("Bearer", "bearer", "BEARER", "bEarer") for spaces in range(1, 11)]
    answers = [client.get("/v1/jobs", headers={"Authorization": way}).status_code for way in ways]
    assert answers.count(200) <= 14  # a burst of the key, and what its address may try
    twice = [("Authorization", f"Bearer {key}"), ("Authorization", "Bearer of nobody")]
    assert client.get("/v1/jobs", headers=twice).status_code == 429


def test_a_page_takes_no_bodies_beyond_the_rate(serve) -> None:
    client = serve(require_keys=True, requests_per_second=0.5)
    assert {client.get("/").status_code for _ in range(20)} == {200}
    assert {client.post(path, json={}).status_code for path in ("/", "/page/main.mjs") * 10} == {405, 429}
