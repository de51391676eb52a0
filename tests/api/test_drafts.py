"""Submissions that open no job."""

import pytest
from starlette.testclient import TestClient

from autotune.loop.budget import START_SECONDS
from storage.store import Store
from tests.api.conftest import REQUEST, problem_of, service, submit
from tests.api.test_security import bearer


def test_a_draft_says_what_a_submission_means(refusing: TestClient) -> None:
    draft = refusing.post("/v1/drafts/check", json=REQUEST).json()
    assert (draft["model"], draft["world_size"], draft["domains"]["zero_stage"]) == ("llama-tiny", 2, [0, 1, 2, 3])
    assert (draft["request"]["trials"], draft["request"]["trial_timeout"]) == (3, 300.0)
    assert draft["baseline"]["zero_stage"] == 0
    assert refusing.get("/v1/jobs").json()["items"] == []


def test_what_nobody_stated_is_listed_with_what_follows_from_it(refusing: TestClient) -> None:
    body = {name: value for name, value in REQUEST.items() if name != "sequence_length"} | {"model": "gpt2"}
    draft, estimate = (refusing.post(f"/v1/drafts/{path}", json=body).json() for path in ("check", "estimate"))
    assert [(item["name"], item["value"], item["alternatives"]) for item in draft["assumed"]] == [("sequence_length", 128, [])]
    assert draft["request"]["sequence_length"] == 128
    (assumed,) = estimate["assumed"]
    assert (assumed["name"], assumed["stated_by"]) == ("sequence_length", "--sequence-length")
    assert [answer["value"] for answer in assumed["alternatives"]] == [512, 1024]
    assert assumed["alternatives"][1]["peak_memory_bytes"] > estimate["best"]["predicted"]["peak_memory_band"]["mean"]
    assert refusing.post("/v1/drafts/estimate", json=body | {"sequence_length": 512}).json()["assumed"] == []


@pytest.mark.parametrize("url", ["/v1/jobs", "/v1/drafts/check", "/v1/drafts/estimate"])
def test_a_job_on_gpus_is_asked_for_its_workload(refusing: TestClient, url: str) -> None:
    body = {"model": "llama-3-8b", "cluster": "dgx-h100"}
    problem = problem_of(refusing.post(url, json=body), 422)
    assert [error["field"] for error in problem["errors"]] == ["sequence_length", "global_batch_size"]
    assert "up to 8,192 for llama-3-8b" in problem["errors"][0]["remedy"]
    problem = problem_of(refusing.post(url, json=body | {"sequence_length": 4096}), 422)
    assert [error["field"] for error in problem["errors"]] == ["global_batch_size"]


def test_a_space_is_counted_without_a_workload(refusing: TestClient) -> None:
    body = {"model": "llama-3-8b", "cluster": "dgx-h100", "pins": {"micro_batch_size": 1}}
    assert refusing.post("/v1/spaces/count", json=body).json()["legal"] > 0


@pytest.mark.parametrize("path", ["check", "estimate"])
@pytest.mark.parametrize(
    "changes",
    [{"model": "llama-huge"}, {"trials": 0}, {"pins": {"zero_stage": 9}}, {"stop_margin": 1, "strategy": "tpe"}],
    ids=str,
)
def test_a_draft_is_refused_as_its_submission_is(refusing: TestClient, path: str, changes: dict) -> None:
    drafted, submitted = (refusing.post(f"/v1/{at}", json=REQUEST | changes) for at in (f"drafts/{path}", "jobs"))
    assert problem_of(drafted, 422) == problem_of(submitted, 422)


def test_what_a_job_may_find_and_cost(refusing: TestClient) -> None:
    found = refusing.post("/v1/drafts/estimate", json=REQUEST | {"trials": 20}).json()
    best, baseline = found["best"]["predicted"], found["baseline"]["predicted"]
    assert found["gain"] == pytest.approx(best["samples_per_second"]["mean"] / baseline["samples_per_second"]["mean"])
    assert found["gain"] > 1
    assert found["calibration_source"].startswith("shipped coefficients")
    assert found["trials"] == 20 + 2 + 9, "the search, two controls, three rounds of three"
    assert 0 < found["trial_seconds"]["low"] <= found["trial_seconds"]["high"]
    assert found["seconds"]["high"] == pytest.approx(31 * found["trial_seconds"]["high"] + 2 * START_SECONDS)
    assert found["device_hours"]["high"] == pytest.approx(2 * found["seconds"]["high"] / 3600)
    planned = refusing.post(
        "/v1/plans", json={name: REQUEST[name] for name in ("model", "ranks", "space", "global_batch_size", "sequence_length")}
    )
    assert planned.json()["plans"][0]["config"] == found["best"]["config"]


def test_a_budget_of_time_bounds_the_cost(refusing: TestClient) -> None:
    found = refusing.post("/v1/drafts/estimate", json=REQUEST | {"trials": 1000, "max_seconds": 60.0}).json()
    # The finalists are measured again beyond it.
    confirmed = 9 * found["trial_seconds"]["high"] + 2 * START_SECONDS
    assert found["seconds"]["high"] == pytest.approx(60.0 + confirmed)
    found = refusing.post("/v1/drafts/estimate", json=REQUEST | {"trials": 1000, "device_hours": 0.01}).json()
    assert found["device_hours"]["high"] == pytest.approx(0.01 + 2 * confirmed / 3600)


def test_where_nothing_fits_the_note_says_so(refusing: TestClient) -> None:
    found = refusing.post("/v1/drafts/estimate", json=REQUEST | {"memory_limit": 8_000_000}).json()
    assert (found["best"], found["gain"]) == (None, None)
    assert "fits into" in found["note"]
    assert found["baseline"]["predicted"]["fit_probability"] < 0.5


def test_the_choices_are_what_submissions_are_held_against(refusing: TestClient) -> None:
    found = refusing.get("/v1/choices").json()
    for kind in ("models", "clusters", "spaces"):
        assert [item["name"] for item in found[kind]] == refusing.get(f"/v1/{kind}").json()["items"]
    submitted = refusing.post("/v1/drafts/check", json={"model": "llama-tiny"}).json()["request"]
    of_cluster = {"global_batch_size", "sequence_length"}
    assert {name for name in of_cluster if found["defaults"][name] is None} == of_cluster
    left_out = {"priority", "failures", *of_cluster}
    assert all(submitted[name] == value for name, value in found["defaults"].items() if name not in left_out)
    kinds = {item["name"]: item["device_kind"] for item in found["clusters"]}
    assert (kinds["local"], kinds["dgx-h100"]) == ("cpu", "cuda")
    assert {item["name"]: item["sequence_length"] for item in found["models"]}["llama-3-8b"] == 8192
    assert {item["name"] for item in found["fields"] if item["required_on"] == "cuda"} == of_cluster
    assert (found["runners"], found["defaults"]["runner"], found["may_submit"]) == (["ray", "local"], "ray", True)


def test_commands_are_shown_to_those_who_may_run_them(database: str, store: Store) -> None:
    with service(database, require_keys=True, commands=("/srv/project:python train.py",)) as client:
        reader, submitter = (bearer(store.keys.create("anna", scopes)[1]) for scopes in ({"read"}, {"read", "submit"}))
        assert client.get("/v1/choices", headers=reader).json()["commands"] == []
        (command,) = client.get("/v1/choices", headers=submitter).json()["commands"]
        assert command == {"folder": "/srv/project", "arguments": ["python", "train.py"]}


def test_what_a_clone_was_asked_for_can_be_checked_again(client: TestClient) -> None:
    job = submit(client, pins={"zero_stage": [1, 2]}, memory_limit=10**9)
    fields = client.get("/v1/choices").json()["defaults"].keys() - {"priority", "failures"}
    again = {name: job["request"][name] for name in fields} | {"model": job["request"]["model"]}
    assert client.post("/v1/drafts/check", json=again).json()["request"] == job["request"]
