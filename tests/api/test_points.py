"""Trials as columns: all of them, then what changed."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from search_spaces.outcome import Outcome, Purpose
from search_spaces.trial import Interval, RankMeasurement, TrialResult
from search_spaces.trial_config import TrialConfig
from storage.leases import current_owner
from storage.records import Lease
from storage.store import Store
from tests.api.conftest import measure, problem_of, submit

RANK = RankMeasurement(
    rank=0, host="machine", node="node-7", peak_memory_bytes=900, memory_by_tag={"parameters": 900}, tag_peak_bytes={},
    rss_peak_bytes=1, cpu_seconds_per_step=0.1, collectives=(),
)  # fmt: skip


def points(client: TestClient, job_id: str, since: int = 0) -> dict[str, Any]:
    answer = client.get(f"/v1/jobs/{job_id}/points", params={"since": since})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_job_that_nothing_is_known_of(client: TestClient) -> None:
    told = points(client, submit(client)["id"])
    assert (told["state"], told["whole"], told["count"], told["best"], told["front"]) == ("QUEUED", True, 0, None, [])
    assert not any(told["columns"].values())
    assert [knob["name"] for knob in told["knobs"]] == ["zero_stage", "micro_batch_size", "activation_checkpointing"]


def test_every_trial_with_what_was_predicted_of_it(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    measure(store, job_id, trials=5)
    told = points(client, job_id)
    columns = told["columns"]
    assert columns["number"] == [0, 1, 2, 3, 4]
    assert columns["rate"] == columns["low"] == [100.0, 101.0, 102.0, 103.0, 104.0]
    assert [told["outcomes"][code] for code in columns["outcome"]] == ["OK"] * 5
    assert all(rate > 0 and peak > 0 for rate, peak in zip(columns["predicted_rate"], columns["predicted_peak"], strict=True))
    assert columns["predicted_peak"][1] < columns["predicted_peak"][0], "a higher stage divides more"
    assert all(0 <= start <= end for start, end in zip(columns["started"], columns["finished"], strict=True))
    assert columns["eligible"] == [1] * 5
    # Single measurements that differ by 4 % prove nothing: the answer is to keep the baseline.
    assert (told["best"]["trial"], told["best"]["keeps_baseline"]) == (0, True)
    stages = next(knob for knob in told["knobs"] if knob["name"] == "zero_stage")
    assert [stages["values"][code] for code in stages["codes"]] == [0, 1, 2, 3, 0]
    assert told["constants"]["tensor_parallel_size"] == 1
    assert told["calibration_source"].startswith("shipped coefficients")


def test_the_same_best_as_the_document(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    measure(store, job_id, trials=5)
    best, told = client.get(f"/v1/jobs/{job_id}/best").json(), points(client, job_id)["best"]
    assert (told["trial"], told["rate"]) == (best["best"]["trial"], best["best"]["measured"]["samples_per_second"])
    assert (told["tie"], told["gain"]) == (best["job"]["tie"], best["baseline"] and best["baseline"]["gain"])


def test_only_what_changed_is_told_again(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    measure(store, job_id, trials=3)
    before = points(client, job_id)
    assert points(client, job_id, before["version"])["columns"]["number"] == []
    lease = store.jobs.acquire(job_id, current_owner())
    token = started(store, lease, TrialConfig(zero_stage=3, micro_batch_size=2))
    running = points(client, job_id, before["version"])
    assert (running["whole"], running["count"], running["columns"]["number"]) == (False, 4, [3])
    assert (running["columns"]["outcome"], running["columns"]["finished"], running["columns"]["attempts"]) == (
        [None],
        [None],
        [1],
    )
    assert running["columns"]["started"][0] > 0
    result = TrialResult(attempt=token, outcome=Outcome.OK, samples_per_second=Interval(mean=200.0, low=190.0, high=210.0),
                         peak_memory_bytes=900, ranks=(RANK,))  # fmt: skip
    store.attempts.finish(lease, result)
    ended = points(client, job_id, running["version"])
    assert (ended["columns"]["number"], ended["columns"]["rate"], ended["best"]["trial"]) == ([3], [200.0], 3)
    assert [ended["nodes"][code] for code in ended["columns"]["node"]] == ["node-7"]
    assert ended["columns"]["predicted_rate"] == running["columns"]["predicted_rate"]


def test_who_knows_too_little_is_told_everything(client: TestClient, store: Store, monkeypatch) -> None:
    monkeypatch.setattr("autotune.explain.figures.points.MOST_EVENTS", 4)
    job_id = submit(client)["id"]
    measure(store, job_id, trials=3)
    version = points(client, job_id)["version"]
    assert [points(client, job_id, version - behind)["whole"] for behind in (4, 5)] == [False, True]


def test_a_value_that_comes_later_leaves_codes_as_they_were(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    lease = store.jobs.acquire(job_id, current_owner())
    started(store, lease, TrialConfig(zero_stage=2))
    before = points(client, job_id)
    assert "reduce_bucket_size" not in [knob["name"] for knob in before["knobs"]]
    started(store, lease, TrialConfig(zero_stage=2, reduce_bucket_size=1000))
    (knob,) = [one for one in points(client, job_id, before["version"])["knobs"] if one["name"] == "reduce_bucket_size"]
    assert (knob["values"], knob["codes"]) == ([before["constants"]["reduce_bucket_size"], 1000], [1])


def test_infeasible_trials_stand_where_they_are_predicted(client: TestClient, store: Store) -> None:
    job_id = submit(client, memory_limit=10**9, headroom=0.1)["id"]
    lease = store.jobs.acquire(job_id, current_owner())
    refusal = TrialResult(attempt="", outcome=Outcome.INVALID, rule="batch.too_large", message="too large")
    store.trials.add(lease, TrialConfig(micro_batch_size=8), Purpose.SEARCH, refusal=refusal)
    token = started(store, lease, TrialConfig(micro_batch_size=4))
    store.attempts.finish(lease, TrialResult(attempt=token, outcome=Outcome.INFEASIBLE, peak_memory_bytes=2 * 10**9))
    told = points(client, job_id)
    assert [told["outcomes"][code] for code in told["columns"]["outcome"]] == ["INVALID", "INFEASIBLE"]
    assert [code is not None and told["causes"][code] for code in told["columns"]["cause"]] == ["batch.too_large", False]
    assert [peak is not None for peak in told["columns"]["predicted_peak"]] == [False, True]
    assert told["columns"]["eligible"] == [0, 0]
    assert (told["limit_bytes"], told["capacity_bytes"], told["best"]) == (10**9, 900_000_000, None)


@pytest.mark.prove
def test_a_version_that_is_none(client: TestClient) -> None:
    problem_of(client.get(f"/v1/jobs/{submit(client)['id']}/points", params={"since": -1}), 422)


def started(store: Store, lease: Lease, config: TrialConfig) -> str:
    """Add a trial and start an attempt at it; its token."""
    return store.attempts.start(lease, store.trials.add(lease, config, Purpose.SEARCH).number).token
