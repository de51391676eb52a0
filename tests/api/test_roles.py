"""Roles: every route names the one that it needs, and keys of each role reach what they may and nothing else."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from api.app import with_routes
from api.reference import EVERYBODY, roles, table
from search_spaces.outcome import JobState
from storage.leases import current_owner
from storage.records import Scope
from storage.store import Store
from tests.api.conftest import REQUEST, measure, problem_of, submit

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
OPEN = {
    "GET /", "GET /page/{name:path}", "GET /livez", "GET /readyz", "GET /openapi.json", "GET /docs",
    "GET /docs/oauth2-redirect", "GET /redoc",
}  # fmt: skip
"""Whoever asks may see these: the page without what it shows, whether the server lives, and the interface itself."""


@pytest.fixture
def keyed(serve) -> TestClient:
    client: TestClient = serve(require_keys=True)
    return client


def headers(store: Store, owner: str, *scopes: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {store.keys.create(owner, scopes)[1]}"}


def test_every_route_needs_a_role_but_those_that_are_open_to_everybody() -> None:
    open_to_all = {route for route, role in roles(with_routes()).items() if role == EVERYBODY}
    assert open_to_all <= OPEN, "a new route needs a role: give it a Reader, Submitter, Steerer, Operator or Administrator"


def test_the_table_in_the_docs_is_that_of_the_routes() -> None:
    """Write it anew with `python -m api.reference roles`."""
    assert table() in PAGE.read_text(encoding="utf-8")


def test_changes_need_more_than_read() -> None:
    unchanged = {
        "/v1/spaces/count",
        "/v1/spaces/validate",
        "/v1/drafts/check",
        "/v1/drafts/estimate",
        "/v1/predictions",
        "/v1/plans",
        "/v1/fits",
    }
    for route, role in roles(with_routes()).items():
        method, _, path = route.partition(" ")
        if method != "GET" and path not in unchanged:
            assert role in ("submit", "submit or operate"), route


def test_an_operator_steers_everybodys_jobs_and_opens_none(keyed: TestClient, store: Store) -> None:
    job = submit(keyed, headers(store, "anna", "read", "submit"))["id"]
    operator, other = headers(store, "ops", "operate"), headers(store, "bert", "read", "submit")
    assert [item["id"] for item in keyed.get("/v1/jobs", headers=operator).json()["items"]] == [job]
    problem_of(keyed.post(f"/v1/jobs/{job}/cancel", headers=other), 404)
    assert keyed.patch(f"/v1/jobs/{job}", json={"note": "seen"}, headers=operator).status_code == 200
    assert keyed.post(f"/v1/jobs/{job}/pause", headers=operator).status_code == 202
    assert store.jobs.get(job).state is JobState.PAUSED
    for method, path in (
        ("POST", "/v1/jobs"),
        ("POST", f"/v1/jobs/{job}/clone"),
        ("POST", "/v1/webhooks"),
        ("GET", "/v1/audit"),
    ):
        body = REQUEST if path == "/v1/jobs" else {"url": "https://a.example/"} if "webhooks" in path else None
        detail = problem_of(keyed.request(method, path, json=body, headers=operator), 403)["detail"]
        assert "Authorization: lacks the scope" in detail


def test_webhooks_of_others_are_the_administrators_alone(keyed: TestClient, store: Store) -> None:
    made = store.webhooks.create("anna", "https://a.example/")
    for role, seen in (("operate", []), ("admin", [made.id])):
        items = keyed.get("/v1/webhooks", headers=headers(store, "ops", role)).json()["items"]
        assert [item["id"] for item in items] == seen


def test_an_administrator_has_every_role_and_an_operator_reads(keyed: TestClient, store: Store) -> None:
    admin = headers(store, "root", "admin")
    job = submit(keyed, admin)["id"]
    assert keyed.get("/v1/audit", headers=admin).status_code == 200
    assert keyed.get(f"/v1/jobs/{job}", headers=headers(store, "ops", "operate")).status_code == 200
    assert {scope.value for scope in Scope} == {"read", "observe", "submit", "operate", "admin"}


def test_jobs_are_named_in_the_metrics_for_their_owner_and_for_operators(keyed: TestClient, store: Store) -> None:
    anna, bert = (headers(store, owner, "read", "submit") for owner in ("anna", "bert"))
    job = submit(keyed, anna)["id"]
    measure(store, job, trials=1)
    lease = store.jobs.acquire(job, current_owner())
    told = {}
    for who, given in (("anna", anna), ("bert", bert), ("ops", headers(store, "ops", "operate"))):
        text = keyed.get("/metrics", headers=given).text
        told[who] = job in text
        assert 'autotune_jobs{state="RUNNING"} 1.0' in text
    assert told == {"anna": True, "bert": False, "ops": True}
    store.jobs.release(lease, JobState.PAUSED, "", "")
