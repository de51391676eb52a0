"""Who means ill: names that are paths or code, sizes and spaces that would be counted for hours, bodies that fill the memory,
and everybody's jobs by everybody else's keys. Each is refused within seconds, by its field, and leaves no row.
"""

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from api import submission
from api.app import create_app
from api.computing import ThreadPools
from api.limits import KnownKeys, Rates
from api.settings import Settings
from storage.store import Store, open_store
from tests.api.asgi import Raw, ask
from tests.api.conftest import REQUEST, measure, problem_of, service, submit
from tests.api.malformed import HOST, JSON, MODEL
from tests.api.test_security import bearer
from tests.sampling import sampled

QUICK_SECONDS = 30.0
"""Of computing, where hours are meant: tests share their machine."""
PATHS = (
    "../../etc/passwd", "/etc/passwd", "%2e%2e%2fetc%2fpasswd", "..\\..\\etc\\passwd", "file:///etc/passwd", "~/.ssh/id_rsa",
    "pyproject.toml", "./api/app.py", "tests", ".", "..", "/", "/dev/zero", "/proc/self/environ", "etc/passwd\x00.json",
    "a\x00b", "", " ", "x" * 300, "local\n", "\u202e", "＿", "http://evil.example/x.toml",
)  # fmt: skip
CODE = (
    "os:system", "mine:build ", " mine:build", "Mine:build", "mine:Build", "mine.build", "mine:build:", "mine:build.x",
    "mine::build", "xmine:build", "mine.sub:build", "sub.mine:build", "mіne:build", "mine：build", "mine:build\n",
    "mine:__import__", "builtins:eval", "mine:build\x00", "ｍine:build", "mine:build()", "mine;build", "subprocess:run",
)  # fmt: skip


def spent(client: TestClient, method: str, url: str, **more: Any) -> tuple[Any, float]:
    began = time.process_time()
    return client.request(method, url, **more), time.process_time() - began


@pytest.mark.prove(every=8)
@pytest.mark.parametrize("name", PATHS, ids=repr)
def test_no_name_is_a_path(refusing: TestClient, untouched: Store, name: str) -> None:
    for change in (
        {"model": name}, {"model": {"name": name, "config": MODEL}}, {"cluster": name}, {"space": name}, {"engine": name},
        {"strategy": name}, {"runner": name}, {"objective": name}, {"pins": {name: 1}}, {"baseline": {name: 1}},
        {"pins": {"zero_stage": name}},
    ):  # fmt: skip
        if change in ({"model": {"name": "tests", "config": MODEL}}, {"model": {"name": "pyproject.toml", "config": MODEL}}):
            continue  # names as good as any: they are nowhere looked up
        document = problem_of(refusing.post("/v1/jobs", json=REQUEST | change), 422)
        assert "root:" not in json.dumps(document)
    assert untouched.jobs.newest() == []


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[tuple[TestClient, str]]:
    """A client, and the address of the export of a job that has something to export."""
    database = str(shutil.copy(migrated, tmp_path_factory.mktemp("export") / "jobs.db"))
    with open_store(database) as store, service(database) as client:
        job_id = submit(client)["id"]
        measure(store, job_id)
        address = f"/v1/jobs/{job_id}/export"
        assert client.get(address, params={"format": "deepspeed"}).status_code == 200
        yield client, address


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("name", PATHS, ids=repr)
def test_no_format_is_a_path(export: tuple[TestClient, str], name: str) -> None:
    client, address = export
    answer = client.get(address, params={"format": name})
    problem_of(answer, answer.status_code)
    assert answer.status_code in (404, 422)


@pytest.fixture(scope="module")
def allowing(untouched_database: str) -> Iterator[TestClient]:
    """A client of a service that allows one factory."""
    with service(untouched_database, factories=("mine:build",)) as client:
        yield client


@pytest.mark.prove(every=3)
@pytest.mark.parametrize("name", CODE, ids=repr)
def test_only_factories_that_were_allowed_letter_by_letter(allowing: TestClient, untouched: Store, name: str) -> None:
    problem_of(allowing.post("/v1/jobs", json=REQUEST | {"model": name}), 422)
    if name != "mine.build":  # a name as good as any, and no reference
        problem_of(allowing.post("/v1/jobs", json=REQUEST | {"model": {"name": name, "config": MODEL}}), 422)
    assert untouched.jobs.newest() == []


def test_an_upload_does_not_pass_for_a_preset(refusing: TestClient, untouched: Store) -> None:
    refused = refusing.post("/v1/jobs", json=REQUEST | {"model": {"name": "llama-3-8b", "config": MODEL}})
    assert problem_of(refused, 422)["errors"][0]["field"] == "model.name"
    assert untouched.jobs.newest() == []


@pytest.mark.parametrize(
    "value", [10**18, 10**9, 2**31, 10**400, 0, -1, -(10**18), 64.0, 1e300, True, "64", None, [64], {"x": 1}]
)
@pytest.mark.parametrize("key", sampled(sorted(MODEL.keys() - {"model_type"}), every=3))
def test_absurd_sizes_of_a_model_are_refused_at_once(refusing: TestClient, untouched: Store, key: str, value: object) -> None:
    if value == 10**9 and key != "num_hidden_layers":
        value = 10**10  # some sizes of 10**9 are only large
    for url in ("/v1/jobs", "/v1/spaces/count"):
        config = MODEL | {key: value}
        answer, seconds = spent(refusing, "POST", url, json=REQUEST | {"space": "full", "model": {"config": config}})
        problem_of(answer, 422)
        assert seconds < QUICK_SECONDS
    assert untouched.jobs.newest() == []


CLUSTER = {"cluster": "dgx-h100:4096", "ranks": None, "model": "llama-3-70b", "space": "full"}
LARGE: tuple[dict[str, Any], ...] = (
    CLUSTER | {"global_batch_size": 2**32, "sequence_length": 2**32},
    CLUSTER | {"cluster": "dgx-h100:999999", "global_batch_size": 2**32, "sequence_length": 2**32},
    CLUSTER | {"cluster": "dgx-h100:999999", "global_batch_size": 999_999 * 8 * 1024, "sequence_length": 2**20},
    CLUSTER | {"global_batch_size": 2**32 - 1, "sequence_length": 2**32 - 1},
    CLUSTER | {"model": {"config": MODEL | {"num_hidden_layers": 10_000}}, "global_batch_size": 2**32},
    CLUSTER | {"pins": {"micro_batch_size": list(range(1, 101)), "reduce_bucket_size": list(range(1, 101)),
                        "loss_chunk_size": list(range(100)), "tensor_parallel_size": list(range(1, 101))}},
    CLUSTER | {"pins": {"micro_batch_size": "divisors", "loss_chunk_size": "divisors", "tensor_parallel_size": "divisors",
                        "context_parallel_size": "divisors"}, "global_batch_size": 4_026_531_840, "sequence_length": 2**32},
    {"space": "3d", "pins": {"pipeline_parallel_size": 2**53, "virtual_stages": 2**53, "pipeline_split": "even"}},
    {"space": "full", "pins": {"checkpoint_every_k": 2**53, "virtual_stages": list(range(1, 101))}},
    {"space": "full", "pins": {"pipeline_parallel_size": [2**n for n in range(53)], "virtual_stages": [1, 2, 4, 8, 16]}},
)  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("changes", sampled(LARGE, every=3), ids=range(len(LARGE)))
def test_spaces_that_take_long_are_refused_by_their_field(
    client: TestClient, store: Store, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.computing.CALL_SECONDS", 0.5)  # one of them uses all the time that it gets
    for url, more in (
        ("/v1/jobs", {}),
        ("/v1/spaces/count", {}),
        ("/v1/spaces/validate", {"config": {"pipeline_parallel_size": 10**9}}),
    ):
        answer, seconds = spent(client, "POST", url, json=REQUEST | changes | more)
        assert seconds < QUICK_SECONDS, (url, answer.text[:300])
        if answer.status_code >= 400:
            assert problem_of(answer, 422)["errors"][0]["field"]
        for job in store.jobs.newest():
            assert spent(client, "GET", f"/v1/jobs/{job.id}/best")[1] < QUICK_SECONDS


@pytest.mark.prove
def test_a_space_that_is_too_large_to_count_can_be_searched(client: TestClient) -> None:
    large = REQUEST | LARGE[0]
    assert client.post("/v1/jobs", json=large).status_code == 202
    document = problem_of(client.post("/v1/spaces/count", json=large), 422)
    assert document["errors"][0]["field"] == "space"
    assert "pin some knobs" in document["detail"]


MEGABYTE = 10**6 - 100
BOMBS: dict[str, bytes] = {
    "deep": b'{"model":' + b"[" * 499_000 + b"]" * 499_000 + b"}",
    "deep in a text that never ends": b'{"model": "' + b"[" * MEGABYTE,
    "quotes": b'"' + b'\\"' * (MEGABYTE // 2),
    "open quotes": b'{"a' + b'\\"' * (MEGABYTE // 2),
    "backslashes": b'"' + b"\\" * MEGABYTE,
    "fields": json.dumps(dict.fromkeys(map(str, range(60_000)), 1)).encode(),
    "pins": json.dumps(REQUEST | {"pins": dict.fromkeys(map(str, range(60_000)), 1)}).encode(),
    "values": json.dumps(REQUEST | {"pins": {"zero_stage": [1] * 300_000}}).encode(),
    "config": json.dumps(REQUEST | {"model": {"config": dict.fromkeys(map(str, range(60_000)), 1)}}).encode(),
    "digits": b'{"model": "llama-tiny", "trials": ' + b"9" * MEGABYTE + b"}",
    "a fraction": b'{"model": "llama-tiny", "headroom": 0.' + b"9" * MEGABYTE + b"}",
    "an exponent": b'{"model": "llama-tiny", "headroom": 1e' + b"9" * MEGABYTE + b"}",
    "one text": json.dumps(REQUEST | {"model": {"config": MODEL | {"model_type": "x" * 900_000}}}).encode(),
    "surrogates": b'{"model": "' + b"\\ud800" * (MEGABYTE // 6) + b'"}',
    "spaces": b" " * MEGABYTE,
    "lists": json.dumps(REQUEST | {"model": {"config": MODEL | {"x": [[]] * 240_000}}}).encode(),
    "wrong rows": json.dumps(
        REQUEST | {"failures": {f"r{n}": dict.fromkeys(map(str, range(900)), 1) for n in range(80)}}
    ).encode(),
    "wrong values": json.dumps(REQUEST | {"pins": {f"k{n}": [{}] * 45 for n in range(100)}}).encode(),
    "expressions": json.dumps(
        REQUEST | {"failures": {f"r{n}": {"said": [f"(?:{n}{m}a?){{90}}" for m in range(100)]} for n in range(24)}}
    ).encode(),
    "large expressions": json.dumps(REQUEST | {"failures": {"r": {"said": [f"(?:{n}a?){{190}}" for n in range(99)]}}}).encode(),
    "twice": b'{"trials": 1, "model": "llama-tiny", "trials": 1000}',
    "UTF-16": json.dumps(REQUEST).encode("utf-16"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_of_a_megabyte_do_no_harm(refusing: TestClient, untouched: Store, bomb: str) -> None:
    for url in ("/v1/jobs", "/v1/spaces/validate"):
        answer, seconds = spent(refusing, "POST", url, content=BOMBS[bomb], headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422)
        problem_of(answer, answer.status_code)
        assert seconds < QUICK_SECONDS
        assert len(answer.content) < 60_000
    assert untouched.jobs.newest() == []


@pytest.mark.prove
def test_nobody_has_a_key_to_the_jobs_of_another(serve, store: Store) -> None:
    """Every operation that names a job, as the document lists them."""
    client = serve(require_keys=True)
    anna, ben = (bearer(store.keys.create(owner, {"read", "submit"})[1]) for owner in ("anna", "ben"))
    job_id = submit(client, anna)["id"]
    measure(store, job_id)
    before = store.jobs.get(job_id), store.events.of(job_id)
    paths = client.app.openapi()["paths"]
    asked = 0
    for path, item in paths.items():
        for method in item:
            if "{job_id}" not in path:
                continue
            bodies = {"patch": {"trials": 9}, "post": {"days": 1}}
            more = {"json": bodies[method]} if method == "patch" or (method, path[-6:]) == ("post", "/links") else {}
            more |= {"params": {"other": 0}} if "differences" in path else {}
            for job in (job_id, "20300101-000000-aaaa"):
                url = path.format(job_id=job, number=0, name="timeline", link_id="0123456789ab")
                problem_of(client.request(method, url, headers=ben, **more), 404)
            asked += 1
    assert asked >= 13
    assert client.get("/v1/jobs", headers=ben).json()["items"] == []
    assert (store.jobs.get(job_id), store.events.of(job_id)) == before
    assert len(store.jobs.newest()) == 1


@pytest.mark.prove
def test_who_may_only_read_changes_nothing(serve, store: Store) -> None:
    client = serve(require_keys=True)
    writer, reader = (bearer(store.keys.create("anna", scopes)[1]) for scopes in ({"submit"}, {"read"}))
    job_id = submit(client, writer)["id"]
    before = store.jobs.get(job_id), store.events.of(job_id)
    for path, item in client.app.openapi()["paths"].items():
        for method in item:
            if method == "get" or path.startswith(("/v1/spaces/", "/v1/predictions", "/v1/plans", "/v1/fits", "/v1/drafts/")):
                continue
            bodies = {"/v1/jobs": REQUEST, "/v1/webhooks": {"url": "https://8.8.8.8/"}, "/v1/jobs/{job_id}": {"trials": 9}}
            bodies["/v1/jobs/{job_id}/links"] = {"days": 1}
            body = {"json": bodies[path]} if path in bodies else {}
            address = path.format(job_id=job_id, webhook_id="0123456789ab", link_id="0123456789ab")
            problem_of(client.request(method, address, headers=reader, **body), 403)
    problem_of(client.get("/v1/jobs", headers=writer), 403)
    assert (store.jobs.get(job_id), store.events.of(job_id)) == before
    assert len(store.jobs.newest()) == 1


@pytest.mark.parametrize(
    "host", ["[", "[::1", "]", "127.0.0.1:x", "127.0.0.1@evil.example", "%6c", "\x7f", "[::ffff:10.0.0.1]", "0"]
)
def test_a_host_that_is_no_name_is_refused(refusing: TestClient, host: str) -> None:
    answer = refusing.get("/v1/jobs", headers={"Host": host})
    assert answer.status_code == (200 if host == "127.0.0.1:x" else 421)


@pytest.mark.parametrize(
    "origin", ["http://[", "http://[evil", "", "null", "http://", "//127.0.0.1:8000.evil.example", "http://127.0.0.1"]
)
def test_an_origin_that_is_no_address_is_refused(refusing: TestClient, untouched: Store, origin: str) -> None:
    problem_of(refusing.post("/v1/jobs", json=REQUEST, headers={"Origin": origin}), 403)
    assert untouched.jobs.newest() == []


def test_no_redirect_names_the_host_of_the_request(serve, store: Store) -> None:
    client = serve(require_keys=True)
    for path in ("/v1/jobs/", "/v1/models/", "/livez/", "/v1//jobs", "//evil.example/v1/jobs/"):
        answer = client.get(path, headers={"Host": "evil.example"}, follow_redirects=False)
        problem_of(answer, 404)
        assert "evil" not in str(answer.headers)


def test_an_unknown_method_is_told_which_there_are(client: TestClient) -> None:
    job_id = submit(client)["id"]
    for path, methods in (
        ("/v1/jobs", "GET, HEAD, POST"), (f"/v1/jobs/{job_id}", "GET, HEAD, PATCH"), ("/livez", "GET, HEAD")
    ):  # fmt: skip
        answer = client.delete(path)
        problem_of(answer, 405)
        assert answer.headers["allow"] == methods


def test_a_body_that_breaks_off_is_not_acted_on(store: Store, database: str) -> None:
    """What arrived of it reads as a whole request; its length said that there was more."""
    app = create_app(Settings(database_url=database, require_keys=False))
    body = json.dumps(REQUEST).encode()
    request = Raw(method="POST", headers=(HOST, JSON, (b"content-length", b"900")), body=(body,), ends=False)
    assert asyncio.run(ask(app, request)).status == 400
    assert store.jobs.newest() == []


def test_a_body_that_does_not_come_is_waited_for_a_while(store: Store, database: str) -> None:
    app = create_app(Settings(database_url=database, require_keys=False, body_seconds=0.1))
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(Raw(method="POST", headers=(HOST, JSON)).scope(), receive, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


def test_a_new_wrong_key_for_each_request_does_not_get_around_the_rate(
    serve, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.guard.Rates", partial(Rates, clock=lambda: 0.0))  # nothing comes back between two requests
    client = serve(require_keys=True, requests_per_second=0.5)
    key = bearer(store.keys.create("anna", {"read"})[1])
    assert client.get("/v1/models", headers=key).status_code == 200
    statuses = [client.get("/v1/models", headers=bearer(f"at_{number:012x}_x")).status_code for number in range(10)]
    assert statuses == [401] * 4 + [429] * 6
    # Whose key is valid has a rate of their own, whatever others do at the same address.
    assert [client.get("/v1/models", headers=key).status_code for _ in range(6)] == [200] * 5 + [429]


def test_what_is_remembered_of_clients_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.limits.MOST_CLIENTS", 10)
    keys, rates = KnownKeys(), Rates(1.0)
    for number in range(100):
        keys.add(f"Bearer {number}")
        rates.wait(str(number))
    assert len(keys._digests) == len(rates._clients) == 10
    assert keys.client("Bearer 99", "10.0.0.1") != keys.client("Bearer 1", "10.0.0.1") == "10.0.0.1"
    assert keys.client(None, "2001:db8::1") == keys.client(None, "2001:db8::ffff:2") == "2001:db8::/64"
    assert keys.client(None, "unix") == "unix"


@pytest.mark.prove
def test_names_that_do_not_resolve_take_no_thread_of_reads(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the framework has threads."""
    may_end, asked = threading.Event(), threading.Event()

    def dead(*_: object, **__: object) -> None:
        asked.set()
        may_end.wait(60)
        raise socket.gaierror

    monkeypatch.setattr("api.deliverer.socket.getaddrinfo", dead)

    async def run() -> list[int]:
        body = (json.dumps({"url": "https://nowhere.example/"}).encode(),)
        create = Raw(method="POST", target=b"/v1/webhooks", headers=(HOST, JSON), body=body)
        waiting = [asyncio.create_task(ask(client.app, create)) for _ in range(60)]
        try:
            while not asked.is_set():
                await asyncio.sleep(0.01)
            for _ in range(3):
                assert (await asyncio.wait_for(ask(client.app, Raw(headers=(HOST,))), 30)).status == 200
            assert not any(task.done() for task in waiting)
        finally:
            may_end.set()
        return [(await task).status for task in waiting]

    assert set(asyncio.run(run())) == {422}


def test_a_large_submission_is_resolved_in_a_thread(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not it is known; a small one that is known needs none."""
    threads: list[str] = []
    request = submission.request_from_fields

    def seen(fields: dict[str, Any]) -> Any:
        threads.append(threading.current_thread().name)
        return request(fields)

    monkeypatch.setattr(submission, "request_from_fields", seen)
    failures = {"r": {"outcome": "LOST", "remedy": "look", "said": ["x"]}}
    for changes in (
        {},
        {},
        {"failures": failures},
        {"failures": failures},
        {"note": "x" * 1500, "model": {"config": MODEL | {"x": "y" * 5000}}},
    ):
        threads.clear()
        submit(client, **changes)
        assert len(threads) == 1 or changes == {}, threads
        if changes:
            assert threads[0].startswith("submitted"), threads


@pytest.mark.prove
def test_who_waits_to_count_holds_no_thread(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """More counts than there are threads, and the rest of the service answers at once."""
    monkeypatch.setattr("api.computing.PATIENCE_SECONDS", 3600.0)
    client = serve(counts_at_once=1)
    pools: ThreadPools = client.app.state.pools
    may_end = threading.Event()

    async def run() -> list[int]:
        body = (json.dumps(REQUEST).encode(),)
        count = Raw(method="POST", target=b"/v1/spaces/count", headers=(HOST, JSON), body=body)
        held = asyncio.create_task(pools.computing.run(may_end.wait, 60))
        counts = [asyncio.create_task(ask(client.app, count)) for _ in range(60)]
        while pools.computing._inside < 61:
            await asyncio.sleep(0.01)
        assert (await asyncio.wait_for(ask(client.app, Raw(headers=(HOST,))), 60)).status == 200
        assert not any(task.done() for task in counts)
        may_end.set()
        await held
        return [(await task).status for task in counts]

    assert asyncio.run(run()) == [200] * 60
