"""How far jobs are, in one answer for many."""

import pytest
from starlette.testclient import TestClient

from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.store import Store
from tests.api.conftest import measure, problem_of, submit


@pytest.mark.prove
def test_jobs_in_their_order(client: TestClient, store: Store) -> None:
    one, other = submit(client)["id"], submit(client)["id"]
    measure(store, one, trials=3)
    answer = client.get("/v1/overviews", params={"job": [other, one, other]})
    document = client.get(f"/v1/jobs/{one}/best").json()
    baseline, answer_rate = (document[part]["measured"]["samples_per_second"]["mean"] for part in ("baseline", "best"))
    shown = {"best_rate": answer_rate, "baseline_rate": baseline, "gain": document["baseline"]["gain"], "keeps_baseline": True}
    found = {"outcomes": {"OK": 3}, "searched": 3, "running": 0, **shown}
    nothing = {"outcomes": {}, "searched": 0, "running": 0, **dict.fromkeys(shown), "keeps_baseline": False}
    items = answer.json()["items"]
    assert [item.pop("seconds_left") is None for item in items] == [True, False]
    assert [item.pop("waiting") for item in items] == ["no worker runs; start one with `autotune worker`", ""]
    told = [{name: value for name, value in item.items() if name != "version"} for item in items]
    assert told == [{"job": other, **nothing}, {"job": one, **found}]


def test_what_cannot_win_is_no_best(client: TestClient, store: Store) -> None:
    """1,000,000 bytes are within the limit, and beyond what the headroom leaves of it."""
    job_id = submit(client, memory_limit=1_040_000, headroom=0.05)["id"]
    measure(store, job_id)
    (item,) = client.get("/v1/overviews", params={"job": job_id}).json()["items"]
    assert (item["searched"], item["best_rate"]) == (2, None)


def test_what_runs(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    lease = store.jobs.acquire(job_id, current_owner())
    for stage in (1, 2):
        store.trials.add(lease, TrialConfig(zero_stage=stage), Purpose.SEARCH)
    store.attempts.start(lease, 0)
    (item,) = client.get("/v1/overviews", params={"job": job_id}).json()["items"]
    assert (item["running"], item["searched"], item["outcomes"]) == (1, 0, {})


def test_repeats_are_not_of_the_budget(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    measure(store, job_id)
    lease = store.jobs.acquire(job_id, current_owner())
    store.trials.add(lease, TrialConfig(zero_stage=0), Purpose.CONFIRM, repeat=1)
    token = store.attempts.start(lease, 2).token
    faster = Interval(mean=500.0, low=500.0, high=500.0)
    result = TrialResult(attempt=token, outcome=Outcome.OK, samples_per_second=faster, peak_memory_bytes=1_000_000)
    store.attempts.finish(lease, result)
    (item,) = client.get("/v1/overviews", params={"job": job_id}).json()["items"]
    assert (item["outcomes"], item["searched"]) == ({"OK": 3}, 2)


@pytest.mark.prove
def test_a_job_that_is_not_there(client: TestClient) -> None:
    known = submit(client)["id"]
    problem_of(client.get("/v1/overviews", params={"job": [known, "20300101-000000-aaaa"]}), 404)
    problem_of(client.get("/v1/overviews"), 422)
    problem_of(client.get("/v1/overviews", params={"job": "../x"}), 422)


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
