"""Quotas and the audit log as the service shows them."""

import asyncio

import pytest
from starlette.testclient import TestClient

from api.limits import LIMIT_SECONDS, OwnerLimits
from storage.service_records import Quota, Quotas
from storage.store import Store
from tests.api.conftest import REQUEST, problem_of, submit


@pytest.fixture
def anna(store: Store) -> dict[str, str]:
    return {"Authorization": f"Bearer {store.keys.create('anna', {'read', 'submit'})[1]}"}


def test_a_quota_that_is_used_up_is_one_problem_that_names_it_its_use_and_its_limit(serve, store: Store, anna) -> None:
    client = serve(require_keys=True, quotas=Quotas(queued_jobs=1, webhooks=0))
    job = submit(client, anna)["id"]
    paused = submit_paused(client, store, anna)
    for method, path, body in (
        ("POST", "/v1/jobs", REQUEST), ("POST", f"/v1/jobs/{job}/clone", None), ("POST", f"/v1/jobs/{paused}/resume", None),
    ):  # fmt: skip
        found = problem_of(client.request(method, path, json=body, headers=anna), 409)
        assert (found["quota"], found["used"], found["limit"]) == ("queued_jobs", 1, 1), path
        assert found["errors"][0]["field"] == "quota.queued_jobs"
        assert "cancel some" in found["detail"]
    assert len(store.jobs.newest()) == 2


def submit_paused(client: TestClient, store: Store, headers: dict[str, str]) -> str:
    """A job of the same owner that waits for nobody."""
    store.quotas.set_limit("anna", Quota.QUEUED_JOBS, 2)
    job: str = submit(client, headers)["id"]
    assert client.post(f"/v1/jobs/{job}/pause", headers=headers).status_code == 202
    store.quotas.set_limit("anna", Quota.QUEUED_JOBS, None)
    return job


def test_bytes_of_requests_have_a_limit(serve, store: Store, anna) -> None:
    size = next(use.used for use in store.quotas.uses("x", Quotas()) if use.quota is Quota.STORED_BYTES)
    assert size == 0
    client = serve(require_keys=True, quotas=Quotas(stored_bytes=20_000))
    count = 0
    while (answer := client.post("/v1/jobs", json=REQUEST | {"note": "n" * 2000}, headers=anna)).status_code == 202:
        count += 1
        assert count < 20
    assert problem_of(answer, 409)["quota"] == "stored_bytes"
    assert count >= 1


def test_usage_tells_what_is_used_of_each_quota(serve, store: Store, anna) -> None:
    client = serve(require_keys=True, quotas=Quotas(queued_jobs=5, device_hours=2))
    submit(client, anna)
    found = {item["quota"]: item for item in client.get("/v1/usage", headers=anna).json()["quotas"]}
    assert set(found) == {str(quota) for quota in Quota}
    assert found["queued_jobs"] == {"quota": "queued_jobs", "used": 1, "limit": 5}
    assert found["stored_bytes"]["used"] > 100
    assert found["device_hours"] == {"quota": "device_hours", "used": 0, "limit": 2}


@pytest.mark.prove
def test_what_was_done_is_told_to_administrators_with_key_and_address(serve, store: Store, anna) -> None:
    client = serve(require_keys=True)
    job = submit(client, anna)["id"]
    client.post(f"/v1/jobs/{job}/cancel", headers=anna)
    key, text = store.keys.create("root", {"admin"})
    admin = {"Authorization": f"Bearer {text}"}
    problem_of(client.get("/v1/audit", headers=anna), 403)
    items = client.get("/v1/audit", headers=admin).json()["items"]
    assert [(item["action"], item["target"]) for item in items[:3]] == [
        ("key.create", key.id), ("job.cancel", job), ("job.submit", job)
    ]  # fmt: skip
    assert items[1]["actor"] == "anna"
    assert items[1]["key"] == next(found.id for found in [*store.keys.all()] if found.owner == "anna")
    assert items[1]["source"] == "testclient"
    pages, cursor = [], ""
    while cursor is not None:
        page = client.get(f"/v1/audit?limit=1{f'&cursor={cursor}' if cursor else ''}", headers=admin).json()
        pages += page["items"]
        cursor = page["next"]
    assert pages == client.get("/v1/audit", headers=admin).json()["items"]
    assert [item["target"] for item in client.get("/v1/audit?action=job.submit", headers=admin).json()["items"]] == [job]
    assert client.get("/v1/audit?since=2026-01-01T00:00:00Z", headers=admin).json()["items"] == pages
    for since in ("2026-01-01T00:00:00", "0.5", "2026-13-01T00:00:00Z", "0001-01-01T00:00:00%2B05:00"):
        problem_of(client.get(f"/v1/audit?since={since}", headers=admin), 422)


def test_limits_are_looked_up_once_for_a_few_seconds(store: Store) -> None:
    now = [0.0]
    limits = OwnerLimits(store, Quotas(streams=7), lambda: now[0])

    async def run() -> None:
        assert await limits.most("anna", Quota.STREAMS) == 7
        await asyncio.to_thread(store.quotas.set_limit, "anna", Quota.STREAMS, 9)
        assert await limits.most("anna", Quota.STREAMS) == 7
        now[0] += LIMIT_SECONDS
        assert await limits.most("anna", Quota.STREAMS) == 9

    asyncio.run(run())
