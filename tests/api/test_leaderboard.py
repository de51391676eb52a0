"""The fastest answers by model and cluster, and the knobs in which two trials differ."""

import pytest
from starlette.testclient import TestClient

from storage.store import Store
from tests.api.conftest import measure, problem_of, submit


def test_the_fastest_of_jobs_that_can_be_compared(client: TestClient, store: Store) -> None:
    slow, fast = (submit(client, name=name)["id"] for name in ("first", "second"))
    other_length = submit(client, sequence_length=32)["id"]
    submit(client)  # without an answer
    measure(store, slow, trials=1)
    measure(store, fast, trials=3)
    measure(store, other_length, trials=1)
    board = client.get("/v1/leaderboard").json()
    shown = [(entry["sequence_length"], entry["jobs"], entry["job"]) for entry in board["items"]]
    assert shown == [(32, 1, other_length), (64, 2, fast)]
    best = client.get(f"/v1/jobs/{fast}").json()["answer"]
    entry = board["items"][1]
    assert (entry["name"], entry["trial"], entry["rate"]["mean"]) == ("second", best["trial"], best["rate"]["mean"])
    assert (entry["model"], entry["cluster"], entry["ranks"], entry["global_batch_size"]) == ("llama-tiny", "local", 2, 8)
    assert board["jobs"] == 3
    assert client.get("/v1/leaderboard", params={"model": "gpt2"}).json() == {"items": [], "jobs": 0}
    assert len(client.get("/v1/leaderboard", params={"cluster": "local"}).json()["items"]) == 2
    problem_of(client.get("/v1/leaderboard", params={"model": "x" * 201}), 422)


@pytest.fixture
def measured(client: TestClient, store: Store) -> str:
    job: str = submit(client)["id"]
    measure(store, job, trials=3)
    return job


@pytest.mark.prove
def test_knobs_that_differ_with_their_effects(client: TestClient, measured: str) -> None:
    found = client.get(f"/v1/jobs/{measured}/trials/0/differences", params={"other": 2}).json()
    (knob,) = found["knobs"]
    assert (knob["knob"], knob["before"], knob["after"]) == ("zero_stage", 0, 2)
    assert knob["first"] == knob["last"] == found["total"]  # it is the only one
    assert found["total"]["peak_memory"] < 1
    assert found["measured_speed"] == pytest.approx(102 / 100)
    back = client.get(f"/v1/jobs/{measured}/trials/2/differences", params={"other": 0}).json()
    assert back["total"]["speed"] == pytest.approx(1 / found["total"]["speed"])


@pytest.mark.prove
def test_a_trial_and_itself(client: TestClient, measured: str) -> None:
    found = client.get(f"/v1/jobs/{measured}/trials/1/differences", params={"other": 1}).json()
    assert found["knobs"] == []
    assert found["total"] == {"speed": 1.0, "peak_memory": 1.0}


@pytest.mark.prove
def test_unknown_trials(client: TestClient, measured: str) -> None:
    problem_of(client.get(f"/v1/jobs/{measured}/trials/0/differences", params={"other": 9}), 404)
    problem_of(client.get(f"/v1/jobs/{measured}/trials/0/differences"), 422)


def test_models_of_one_name_and_other_shapes_are_not_compared(client: TestClient, store: Store) -> None:
    small = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
             "num_key_value_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}  # fmt: skip
    experts = {"model_type": "mixtral", "num_experts_per_tok": 2}
    others = ({}, {"num_hidden_layers": 4}, experts | {"num_local_experts": 2}, experts | {"num_local_experts": 8})
    jobs = [submit(client, model={"config": small | other})["id"] for other in others]
    for job in jobs:
        measure(store, job, trials=1)
    items = client.get("/v1/leaderboard").json()["items"]
    assert sorted(entry["job"] for entry in items) == sorted(jobs)
    assert {(entry["model"], entry["jobs"]) for entry in items} == {("uploaded", 1)}


def test_a_sweep_of_the_command_line_has_its_ranks(client: TestClient, store: Store) -> None:
    submitted = submit(client)["id"]
    job = store.jobs.create(dict(store.jobs.get(submitted).request), devices=2).id
    measure(store, job, trials=1)
    (entry,) = client.get("/v1/leaderboard").json()["items"]
    assert (entry["ranks"], entry["jobs"]) == (2, 1)
