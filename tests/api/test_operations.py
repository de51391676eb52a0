"""What operators look at: readiness, figures, the log of requests, usage, events that were removed."""

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from api.metrics import Metrics
from api.routes.operations import DiskCheck
from autotune.logs import JsonLines
from search_spaces.outcome import JobState
from storage.errors import DatabaseUnavailableError
from storage.leases import current_owner
from storage.service_records import WorkerRecord
from storage.store import Store
from tests.api.conftest import measure, problem_of, submit


def beat(store: Store, **changes: object) -> None:
    now = datetime.now(UTC)
    values = {"host": "here", "pid": 7, "started": now, "seen": now, "job_id": None, "runner": "", "problem": ""}
    store.workers.beat(WorkerRecord(id="a", **{**values, **changes}))  # type: ignore[arg-type]


def test_readiness_tells_of_database_tables_workers_and_ray(client: TestClient, store: Store) -> None:
    alone = client.get("/readyz")
    assert (alone.status_code, alone.json()["status"], alone.json()["workers"]) == (200, "degraded", "none seen within 60 s")
    beat(store)
    ready = client.get("/readyz").json()
    assert (ready["status"], ready["database"], ready["ray"]) == ("ok", "ok", "not used yet")
    beat(store, runner="ray")
    assert client.get("/readyz").json()["ray"] == "ok"
    beat(store, runner="ray", problem="/secret/path: no room")
    failed = client.get("/readyz")
    assert (failed.status_code, failed.json()["status"]) == (200, "degraded")
    assert failed.json()["ray"].startswith("failed")
    assert "secret" not in failed.text


def test_workers_are_listed_and_a_queued_job_says_why_it_waits(client: TestClient, store: Store) -> None:
    assert client.get("/v1/workers").json() == {"items": []}
    job = submit(client)
    overviews = {"url": "/v1/overviews", "params": {"job": job["id"]}}
    assert client.get(**overviews).json()["items"][0]["waiting"] == "no worker runs; start one with `autotune worker`"
    beat(store, devices="cuda", runners="local ray", problem="no room")
    (worker,) = client.get("/v1/workers").json()["items"]
    assert (worker["host"], worker["runners"], worker["devices"], worker["is_busy"]) == (
        "here",
        ["local", "ray"],
        ["cuda"],
        False,
    )
    assert client.get(**overviews).json()["items"][0]["waiting"].startswith("none of 1 worker has cpu devices; ")


def test_a_server_without_database_or_with_other_tables_is_not_ready(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = client.app.state.store  # type: ignore[attr-defined]
    monkeypatch.setattr(held, "revision", lambda: "9999")
    newer = client.get("/readyz")
    assert (newer.status_code, newer.json()["status"]) == (503, "unavailable")
    assert newer.json()["migration"].startswith("9999, and this server needs")

    def away() -> str:
        raise DatabaseUnavailableError("postgresql://user@secret-host/x: gone")

    monkeypatch.setattr(held, "revision", away)
    gone = client.get("/readyz")
    assert (gone.status_code, gone.json()["database"]) == (503, "cannot be used")
    assert "secret" not in gone.text
    assert client.get("/livez").json() == {"status": "ok"}


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_figures_are_those_of_the_database_and_of_the_requests(client: TestClient, store: Store) -> None:
    measured, waiting = submit(client)["id"], submit(client)["id"]
    measure(store, measured, trials=2)
    lease = store.jobs.acquire(measured, current_owner())
    client.get(f"/v1/jobs/{measured}")
    client.get(f"/v1/jobs/{waiting}")
    client.get("/v1/nowhere/../x")
    found = samples(client.get("/metrics").text)
    assert found["autotune_jobs", "RUNNING"] == found["autotune_jobs", "QUEUED"] == 1
    assert found["autotune_trials_total", "OK"] == found["autotune_trial_seconds_count", "OK"] == 2
    assert found["autotune_trial_seconds_bucket", "1800", "OK"] == found["autotune_trial_seconds_bucket", "+Inf", "OK"] == 2
    assert 0.0 <= found["autotune_trial_seconds_sum", "OK"] < 60.0
    answer = store.jobs.get(measured).answer
    assert answer is not None
    assert found["autotune_job_best_samples_per_second", measured] == pytest.approx(answer["rate"]["mean"])
    assert found["autotune_queue_seconds",] >= 0.0
    assert found["autotune_workers",] == 0
    assert found["autotune_http_request_seconds_count", "GET", "/v1/jobs/{job_id}", "200"] == 2
    assert found["autotune_http_request_seconds_count", "GET", "unknown", "404"] == 1
    store.jobs.release(lease, JobState.PAUSED, "", "")


def test_several_who_scrape_cost_one_look_at_the_database(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, now = [], [0.0]
    read = store.overviews.figures
    monkeypatch.setattr(store.overviews, "figures", lambda: looks.append(now[0]) or read())
    metrics = Metrics(store, clock=lambda: now[0])
    for _ in range(5):
        metrics.text()
        now[0] += 1.0
    assert looks == [0.0]
    now[0] = 10.0
    metrics.text()
    assert looks == [0.0, 10.0]


def test_requests_are_logged_where_that_is_wanted_and_hold_no_secret(
    serve: Callable[..., TestClient], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    _, key = store.keys.create("anna", ("read",))
    client = serve(access_log=True, require_keys=True)
    with caplog.at_level(logging.DEBUG):
        client.get("/v1/jobs?state=RUNNING", headers={"Authorization": f"Bearer {key}"})
        client.get("/v1/jobs", headers={"Authorization": "Bearer at_0123_wrong"})
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == "autotune.access"]
    seen = [(line["method"], line["path"], line["status"]) for line in lines]
    assert seen == [("GET", "/v1/jobs", 200), ("GET", "/v1/jobs", 401)]
    told = "\n".join(JsonLines().format(record) for record in caplog.records)
    assert key not in told
    assert "wrong" not in told


def test_usage_is_ones_own(serve: Callable[..., TestClient], store: Store) -> None:
    keys = {
        name: {"Authorization": f"Bearer {store.keys.create(name, (scope,))[1]}"}
        for name, scope in (("anna", "submit"), ("root", "admin"))
    }
    read = {"Authorization": f"Bearer {store.keys.create('anna', ('read',))[1]}"}
    client = serve(require_keys=True)
    job_id = submit(client, headers=keys["anna"])["id"]
    lease = store.jobs.acquire(job_id, current_owner())
    time.sleep(0.2)
    store.jobs.release(lease, JobState.PAUSED, "", "")
    hers = client.get("/v1/usage", headers=read).json()
    assert (hers["submitter"], hers["queued_jobs"], hers["running_jobs"]) == ("anna", 0, 0)
    assert hers["device_seconds"] >= 0.4  # two ranks
    assert client.get("/v1/usage?submitter=anna", headers=keys["root"]).json() == hers
    assert client.get("/v1/usage?submitter=root", headers=read).json() == hers
    problem_of(client.get("/v1/usage", headers=keys["anna"]), 403)


def test_events_that_were_removed_are_told_as_gone(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    client.post(f"/v1/jobs/{job_id}/cancel")
    store.maintenance.prune(datetime.now(UTC) + timedelta(days=1))
    version = store.jobs.get(job_id).version
    problem = problem_of(client.get(f"/v1/jobs/{job_id}/events"), 410)
    assert f"begin with after={version}" in problem["detail"]
    problem_of(client.get(f"/v1/jobs/{job_id}/events/stream", headers={"Last-Event-ID": "1"}), 410)
    assert client.get(f"/v1/jobs/{job_id}/events?after={version}").json() == {"items": [], "next": version}
    assert client.get(f"/v1/jobs/{job_id}/events/stream?after={version}").status_code == 204


def test_a_full_disk_is_told(client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    disk: DiskCheck = client.app.state.disk  # type: ignore[attr-defined]
    now = [0.0]
    monkeypatch.setattr(disk, "_clock", lambda: now[0])
    monkeypatch.setattr(disk, "_until", 0.0)
    looked = []

    def usage(folder: object) -> SimpleNamespace:
        looked.append(folder)
        return SimpleNamespace(free=1_000_000)

    monkeypatch.setattr("storage.sqlite.shutil.disk_usage", usage)
    for _ in range(3):
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
        assert answer.json()["disk"].startswith("full")
        assert "/" not in answer.json()["disk"]
    assert len(looked) == 1
    assert "1 MB left; free some space" in caplog.text
    now[0] = 10.0
    monkeypatch.setattr("storage.sqlite.shutil.disk_usage", lambda _folder: SimpleNamespace(free=10**12))
    assert client.get("/readyz").json()["disk"] == "ok"


def test_connections_and_streams_are_figures(client: TestClient) -> None:
    found = samples(client.get("/metrics").text)
    assert found["autotune_connections",] == found["autotune_streams", "events"] == found["autotune_streams", "logs"] == 0
    assert found["autotune_stream_failures_total", "events"] == 0
    assert found["autotune_connections_ended_total", "header_timeout"] == 0
