"""Submitting, listing, reading and steering jobs."""

import tracemalloc
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.routes import jobs as routes
from autotune.frameworks.exporters import EXPORTERS
from search_spaces.outcome import JobState
from storage.leases import current_owner
from storage.records import Ask, JobRecord
from storage.store import Store
from tests.api.conftest import REQUEST, measure, problem_of, submit


def test_a_submitted_job_waits_for_a_worker(client: TestClient, store: Store) -> None:
    answer = client.post("/v1/jobs", json=REQUEST)
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (job["state"], job["model"], job["request"]["trials"]) == ("QUEUED", "llama-tiny", 3)
    lease = store.queue.claim(current_owner())
    assert lease is not None
    assert lease.job_id == job["id"]


def test_what_a_request_resolves_to_is_kept_and_not_shown(client: TestClient, store: Store) -> None:
    job = submit(client)
    assert not any(name.startswith("resolved_") for name in job["request"])
    assert store.jobs.get(job["id"]).request["resolved_model"]["num_layers"] > 0


def test_a_job_lists_what_nobody_stated(client: TestClient, store: Store) -> None:
    body = {name: value for name, value in REQUEST.items() if name != "sequence_length"}
    opened = client.post("/v1/jobs", json=body).json()
    assert [(item["name"], item["value"]) for item in opened["assumed"]] == [("sequence_length", 128)]
    assert client.get(f"/v1/jobs/{opened['id']}").json()["assumed"] == opened["assumed"]
    cloned = client.post(f"/v1/jobs/{opened['id']}/clone").json()
    assert cloned["assumed"] == opened["assumed"]
    assert submit(client)["assumed"] == []


def test_an_uploaded_model(client: TestClient, store: Store) -> None:
    config = {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 256, "max_position_embeddings": 128,
    }  # fmt: skip
    job = submit(client, model={"name": "mine", "config": config})
    assert (job["model"], store.jobs.get(job["id"]).request["resolved_model"]["num_layers"]) == ("mine", 3)


def test_a_key_opens_one_job(client: TestClient) -> None:
    headers = {"Idempotency-Key": "mine-1"}
    first, again = submit(client, headers), submit(client, headers)
    assert first["id"] == again["id"]
    refused = client.post("/v1/jobs", json=REQUEST | {"seed": 1}, headers=headers)
    assert problem_of(refused, 422)["errors"][0]["field"] == "Idempotency-Key"
    assert len(client.get("/v1/jobs").json()["items"]) == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "llama-huge"}, "model"),
        ({"model": 3}, "model"),
        ({"trials": 0}, "trials"),
        ({"trials": "many"}, "trials"),
        ({"strategy": "magic"}, "strategy"),
        ({"objective": "fun"}, "objective"),
        ({"pins": {"zero_stag": 1}}, "pins.zero_stag"),
        ({"pins": {"zero_stage": 9}}, "pins.zero_stage"),
        (
            {"pins": {"curriculum_start_length": 2**20, "curriculum_steps": 1}, "training_steps": 9},
            "pins.curriculum_start_length",
        ),
        ({"document_lengths": [16, 0]}, "document_lengths"),
        ({"document_lengths": [1] * 1001}, "document_lengths"),
        ({"document_lengths": "lengths.txt"}, "document_lengths"),
        ({"document_lengths": [2**20]}, "document_lengths"),
        ({"expert_loads": [[1.0, -1.0]]}, "expert_loads"),
        ({"expert_loads": [[1.0, 1.0]]}, "expert_loads"),
        ({"document_lengths": [16], "engine": "deepspeed"}, "document_lengths"),
        ({"baseline": {"zero_stage": 9}}, "baseline.zero_stage"),
        ({"cluster": "nowhere:4"}, "cluster"),
        ({"space": "everything"}, "space"),
        ({"ranks": 100000}, "ranks"),
        ({"nonsense": 1}, "nonsense"),
        ({"sequence_length": 64, "global_batch_size": 7, "pins": {"micro_batch_size": 4}}, "global_batch_size"),
        ({"memory_limit": 2**60}, "memory_limit"),
        ({"runner": "replay"}, "runner"),
        ({"headroom": "NaN"}, "headroom"),
        ({"lr": 0}, "lr"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"clip": "1"}, "clip"),
        ({"optimizer": "adam"}, "optimizer"),
    ],
    ids=str,
)
def test_a_bad_field_is_named_and_nothing_is_written(refusing: TestClient, changes: dict, field: str) -> None:
    answer = refusing.post("/v1/jobs", json=REQUEST | changes)
    fields = [error["field"] for error in problem_of(answer, 422)["errors"]]
    assert any(found.startswith(field) for found in fields), fields
    assert refusing.get("/v1/jobs").json()["items"] == []


def test_hyperparameters_reach_the_exported_file(client: TestClient, store: Store) -> None:
    stated = {"lr": 3e-4, "weight_decay": 0.05, "clip": 0.5, "optimizer": "adamw"}
    job = submit(client, **stated)
    assert {name: job["request"][name] for name in stated} == stated
    measure(store, job["id"], trials=2)
    content = client.get(f"/v1/jobs/{job['id']}/export", params={"format": "deepspeed"}).json()
    assert content["optimizer"] == {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.05}}
    assert content["gradient_clipping"] == 0.5
    plain = submit(client)["id"]
    measure(store, plain, trials=2)
    content = client.get(f"/v1/jobs/{plain}/export", params={"format": "deepspeed"}).json()
    assert content.keys().isdisjoint({"optimizer", "gradient_clipping"})


def test_pages_are_newest_first_and_filtered(client: TestClient) -> None:
    ids = [submit(client, seed=number)["id"] for number in range(5)]
    client.post(f"/v1/jobs/{ids[1]}/pause")
    found, cursor = [], None
    while True:
        page = client.get("/v1/jobs", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        found += [job["id"] for job in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
    assert sorted(found) == sorted(ids)
    paused = client.get("/v1/jobs", params={"state": ["PAUSED", "FAILED"]}).json()["items"]
    assert [job["id"] for job in paused] == [ids[1]]


def test_an_unchanged_job_is_not_sent_again(client: TestClient) -> None:
    job_id = submit(client)["id"]
    tag = client.get(f"/v1/jobs/{job_id}").headers["etag"]
    same = client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": tag})
    assert (same.status_code, same.content) == (304, b"")
    client.post(f"/v1/jobs/{job_id}/pause")
    assert client.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": tag}).status_code == 200


def test_steering(client: TestClient) -> None:
    job_id = submit(client)["id"]
    states = [client.post(f"/v1/jobs/{job_id}/{verb}").json()["state"] for verb in ("pause", "resume", "cancel")]
    assert states == ["PAUSED", "QUEUED", "CANCELLED"]
    assert "cannot resume" in problem_of(client.post(f"/v1/jobs/{job_id}/resume"), 409)["detail"]
    other = client.post(f"/v1/jobs/{job_id}/clone")
    assert other.status_code == 202
    assert (other.json()["state"], other.json()["request"]) == ("QUEUED", client.get(f"/v1/jobs/{job_id}").json()["request"])


def test_a_stopped_job_is_content_with_what_it_has(client: TestClient) -> None:
    job = client.post(f"/v1/jobs/{submit(client)['id']}/stop").json()
    assert (job["state"], job["reason"]) == ("SUCCEEDED", "STOPPED")


def test_a_running_job_is_told(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    lease = store.queue.claim(current_owner())
    assert lease is not None
    assert client.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "CANCELLING"
    assert store.jobs.heartbeat(lease).state is JobState.CANCELLING


def test_a_budget_is_extended_once(client: TestClient) -> None:
    job_id = submit(client)["id"]
    tag = client.get(f"/v1/jobs/{job_id}").headers["etag"]
    changed = client.patch(f"/v1/jobs/{job_id}", json={"trials": 9}, headers={"If-Match": tag})
    assert (changed.status_code, changed.json()["request"]["trials"]) == (200, 9)
    problem_of(client.patch(f"/v1/jobs/{job_id}", json={"trials": 10}, headers={"If-Match": tag}), 412)
    problem_of(client.patch(f"/v1/jobs/{job_id}", json={}), 422)
    problem_of(client.patch(f"/v1/jobs/{job_id}", json={"trials": -1}), 422)
    client.post(f"/v1/jobs/{job_id}/cancel")
    problem_of(client.patch(f"/v1/jobs/{job_id}", json={"trials": 11}), 409)
    assert client.get(f"/v1/jobs/{job_id}").json()["request"]["trials"] == 9


def test_results(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    problem_of(client.get(f"/v1/jobs/{job_id}/best"), 404)
    measure(store, job_id, trials=5)
    page = client.get(f"/v1/jobs/{job_id}/trials", params={"limit": 3}).json()
    rest = client.get(f"/v1/jobs/{job_id}/trials", params={"limit": 3, "cursor": page["next"]}).json()
    assert [trial["number"] for trial in page["items"] + rest["items"]] == [0, 1, 2, 3, 4]
    assert rest["next"] is None
    assert page["items"][0]["result"]["losses"] == [5.0, None]
    (attempt,) = client.get(f"/v1/jobs/{job_id}/trials/2/attempts").json()["items"]
    assert (attempt["trial"], attempt["state"], attempt["outcome"]) == (2, "accepted", "OK")
    assert client.get(f"/v1/jobs/{job_id}/trials/99/attempts").json() == {"items": []}
    best = client.get(f"/v1/jobs/{job_id}/best").json()
    assert best["best"]["config"]["micro_batch_size"] >= 1
    exported = client.get(f"/v1/jobs/{job_id}/export", params={"format": "deepspeed"})
    assert exported.status_code == 200
    assert "zero_optimization" in exported.text
    problem_of(client.get(f"/v1/jobs/{job_id}/export", params={"format": "abacus"}), 404)


@pytest.mark.prove
def test_every_format(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    measure(store, job_id, trials=5)
    for name in EXPORTERS:
        exported = client.get(f"/v1/jobs/{job_id}/export", params={"format": name})
        assert (exported.status_code, bool(exported.text)) == (200, True), name
        assert ("verified: native-only" in exported.headers.get("autotune-note", "")) is (name != "json")


@pytest.mark.parametrize(
    "verb",
    [
        "",
        "/trials",
        "/trials/0/attempts",
        "/best",
        "/export",
        "/points",
        "/figures/timeline",
        "/trials/0/parts",
        "/events",
        "/events/stream",
    ],
)
def test_an_unknown_job(refusing: TestClient, verb: str) -> None:
    problem_of(refusing.get(f"/v1/jobs/20300101-000000-aaaa{verb}"), 404)


def test_the_catalog(client: TestClient) -> None:
    assert "llama-tiny" in client.get("/v1/models").json()["items"]
    assert "local" in client.get("/v1/clusters").json()["items"]
    assert {"zero", "3d"} <= {*client.get("/v1/spaces").json()["items"]}
    assert {engine["engine"] for engine in client.get("/v1/engines").json()["items"]} == {"native", "ddp", "fsdp2", "deepspeed"}
    assert "zero_stage" in {knob["name"] for knob in client.get("/v1/knobs").json()["items"]}


def test_a_space_is_counted_and_a_configuration_judged(client: TestClient) -> None:
    census = client.post("/v1/spaces/count", json=REQUEST).json()
    assert census["legal"] + census["merged"] + sum(census["refused"].values()) == census["raw"]
    judged = client.post("/v1/spaces/validate", json=REQUEST | {"config": {"zero_stage": 2}}).json()
    assert (judged["legal"], judged["refusals"]) == (True, [])
    judged = client.post("/v1/spaces/validate", json=REQUEST | {"config": {"tensor_parallel_size": 3}}).json()
    assert not judged["legal"]
    assert judged["refusals"][0]["remedy"]
    problem_of(client.post("/v1/spaces/validate", json=REQUEST | {"config": {"zero_stage": 17}}), 422)


def test_every_answer_tells_the_version(client: TestClient) -> None:
    for path in ("/livez", "/v1/jobs", "/nowhere"):
        assert client.get(path).headers["autotune-api-version"] == "1"


@pytest.mark.prove
def test_a_job_that_has_succeeded_goes_on_with_a_larger_budget(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    measure(store, job_id, trials=3)
    store.jobs.release(store.jobs.acquire(job_id, current_owner()), JobState.SUCCEEDED, "BUDGET", "3 of 3 trials are spent")
    for body in (None, {"trials": 3}):
        refused = problem_of(client.post(f"/v1/jobs/{job_id}/resume", json=body), 409)
        assert "give it a larger budget (trials above 3), or clone it" in refused["detail"]
    problem_of(client.patch(f"/v1/jobs/{job_id}", json={"trials": 30}), 409)
    job = client.post(f"/v1/jobs/{job_id}/resume", json={"trials": 30}).json()
    assert (job["state"], job["request"]["trials"]) == ("QUEUED", 30)


@pytest.mark.prove
def test_labels_are_set_changed_and_searched_for(client: TestClient, store: Store) -> None:
    job = submit(client, name="nightly", tags=["a100", "smoke"], note="first\nrun")
    plain = submit(client)
    assert [job["request"][field] for field in ("name", "tags", "note")] == ["nightly", ["a100", "smoke"], "first\nrun"]
    ids = [item["id"] for item in client.get("/v1/jobs", params={"tag": ["smoke", "a100"]}).json()["items"]]
    assert ids == [job["id"]]
    assert client.get("/v1/jobs", params={"tag": ["smoke", "other"]}).json()["items"] == []
    store.queue.ask(plain["id"], Ask.CANCEL)
    changed = client.patch(f"/v1/jobs/{plain['id']}", json={"tags": ["smoke"], "note": "kept"}).json()
    assert (changed["state"], changed["request"]["tags"], changed["request"]["note"]) == ("CANCELLED", ["smoke"], "kept")
    for body in ({"tags": ["two words"]}, {"tags": ["a", "a"]}, {"name": "x" * 101}, {"name": "a\nb"}, {"note": "\u009b"}):
        problem_of(client.patch(f"/v1/jobs/{plain['id']}", json=body), 422)
    assert len(client.get("/v1/jobs", params={"tag": "smoke"}).json()["items"]) == 2


def test_a_list_carries_summaries(client: TestClient, store: Store) -> None:
    """However large requests are: a hundred of a megabyte each were a hundred megabytes of answer, and more of memory."""
    large = {
        "pins": {"x": "x" * 500_000},
        "resolved_model": {"name": "large"},
        "model": "large",
        "trials": 3,
        "tags": ["big"],
    }
    made = [store.jobs.create(large).id for _ in range(20)]
    answer = client.get("/v1/jobs?tag=big")
    assert {job["id"] for job in answer.json()["items"]} == {*made}
    assert len(answer.content) < 20_000
    request = answer.json()["items"][0]["request"]
    assert (request["model"], request["trials"], request["tags"]) == ("large", 3, ["big"])
    assert "resolved_model" not in request
    whole = client.get(f"/v1/jobs/{made[0]}").json()["request"]
    assert len(whole["pins"]["x"]) == 500_000
    job_id = submit(client, tags=["small"])["id"]
    client.patch(f"/v1/jobs/{job_id}", json={"tags": ["smaller"], "name": "it"})
    (job,) = client.get("/v1/jobs?tag=smaller").json()["items"]
    assert (job["request"]["name"], job["request"]["tags"]) == ("it", ["smaller"])
    assert client.get("/v1/jobs?tag=small").json()["items"] == []


def test_a_list_does_not_read_requests(store: Store) -> None:
    store.jobs.create({"model": "large", "data_path": "x" * 500_000, "trials": {"not": "a number"}})
    tracemalloc.start()
    try:
        (job,) = store.jobs.summaries()
        assert tracemalloc.get_traced_memory()[1] < 300_000
    finally:
        tracemalloc.stop()
    assert job.request == {"model": "large"}


@pytest.mark.prove
def test_pages_are_bounded_in_bytes(client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no item is lost between them."""
    monkeypatch.setattr("api.views.MOST_BYTES", 5000)
    monkeypatch.setattr("api.views.READ_AT_ONCE", 3)
    jobs = [submit(client, name=f"job {number}", note="n" * 800)["id"] for number in range(9)]
    job_id = jobs[0]
    measure(store, job_id, trials=6)
    lease = store.jobs.acquire(job_id, current_owner())
    for number in range(12):
        store.events.add(lease, "note", {"text": "x" * 700, "number": number})
    for path, key, start in (("/v1/jobs", "id", None), ("/trials", "number", 0), ("/events", "sequence", 0)):
        url = path if start is None else f"/v1/jobs/{job_id}{path}"
        name = "after" if path == "/events" else "cursor"
        found: list[object] = []
        pages = 0
        while True:
            answer = client.get(url, params={} if start is None else {name: start})
            assert len(answer.content) < 6500
            items, following = answer.json()["items"], answer.json()["next"]
            found += [item[key] for item in items]
            pages += 1
            if following is None or not items:
                break
            start = following
        expected = client.get(url, params={"limit": 1}).json()
        assert pages > 1, path
        assert len(found) == len({*map(str, found)}) == {"/v1/jobs": 9, "/trials": 6}.get(path, store.jobs.get(job_id).version)
        assert found[0] == expected["items"][0][key]


@pytest.mark.prove
def test_the_objective_goodput_of_a_job_and_its_answer(client: TestClient, store: Store) -> None:
    job = submit(client, objective="goodput", goodput=["failures=rsc1", "tokens=1e10"])
    row = store.jobs.get(job["id"])
    assert (row.request["objective"], row.request["goodput"]) == ("goodput", ["failures=rsc1", "tokens=1e10"])
    measure(store, job["id"], trials=3)
    best = client.get(f"/v1/jobs/{job['id']}/best").json()["decision"]
    shown = client.get(f"/v1/jobs/{job['id']}/points").json()["best"]
    assert best["goodput"] == shown["goodput"]
    way = best["goodput"]["ways"][0]
    assert way["tokens"] == 1e10 and way["hours_quantiles"]["0.05"] < way["hours_quantiles"]["0.95"]


def test_labels_that_change_at_once_are_all_kept(client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change sets the labels that it names, and no others: another one comes after the job was read."""
    job = submit(client)["id"]
    read = routes.controlled_job

    def read_before_another_change(*given: Any) -> JobRecord:
        found = read(*given)
        store.queue.change_request(job, None, {"tags": ("between",)})
        return found

    monkeypatch.setattr(routes, "controlled_job", read_before_another_change)
    changed = client.patch(f"/v1/jobs/{job}", json={"name": "new"}).json()["request"]
    assert (changed["name"], changed["tags"]) == ("new", ["between"])
