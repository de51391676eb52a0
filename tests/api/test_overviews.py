"""How far jobs are, in one answer for many."""

import pytest
from starlette.testclient import TestClient

from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.owners import current_owner
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
