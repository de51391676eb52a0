"""Links that show one job to whoever has them: what they open, who makes and withdraws them, and when they end."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from starlette.testclient import TestClient

from api.app import with_routes
from api.reference import roles
from storage.store import Store
from tests.api.conftest import BASE, problem_of, submit
from tests.api.test_team import GROUPS, NAME, PROXY, identified


@pytest.fixture
def shared(serve: Callable[..., TestClient]) -> TestClient:
    client = serve(
        require_keys=True, share_days=30, trusted_proxies=("10.1.0.0/16",), identity_header=NAME, groups_header=GROUPS,
        roles=("read", "submit"),
    )  # fmt: skip
    return TestClient(client.app, base_url=BASE, client=(PROXY, 40_000), raise_server_exceptions=False)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def make(client: TestClient, job: str, who: dict[str, str], days: int = 7) -> dict[str, str]:
    answer = client.post(f"/v1/jobs/{job}/links", json={"days": days}, headers=who)
    assert answer.status_code == 201, answer.text
    link: dict[str, str] = answer.json()
    return link


def test_a_link_shows_its_job_and_nothing_else(shared: TestClient) -> None:
    anna = identified("anna", "staff")
    job, other = submit(shared, anna)["id"], submit(shared, anna)["id"]
    token = make(shared, job, anna)["token"]
    for route, role in roles(with_routes()).items():
        method, _, path = route.partition(" ")
        if method != "GET" or role != "read" or "stream" in path or "{number}" in path or "{name}" in path:
            continue
        answer = shared.get(path.replace("{job_id}", job), params={"job": job}, headers=bearer(token))
        if "{job_id}" in path:
            assert answer.status_code == 200 or answer.json()["detail"].startswith(("no best", "job")), (path, answer.text)
            problem_of(shared.get(path.replace("{job_id}", other), headers=bearer(token)), 403)
        else:
            assert f"is a link to job {job} only" in problem_of(answer, 403)["detail"], path
    for action in ("cancel", "clone", "links"):
        problem_of(shared.post(f"/v1/jobs/{job}/{action}", json={"days": 1}, headers=bearer(token)), 403)
    problem_of(shared.get(f"/v1/jobs/{job}/links", headers=bearer(token)), 403)
    problem_of(shared.post("/v1/plans", json={"model": "llama-tiny", "cluster": "dgx-h100"}, headers=bearer(token)), 403)


def test_a_link_opens_for_a_person_whom_the_proxy_knows(shared: TestClient) -> None:
    anna, bert = identified("anna", "staff"), identified("bert", "guests")
    job = submit(shared, anna)["id"]
    token = make(shared, job, anna)["token"]
    problem_of(shared.get(f"/v1/jobs/{job}", headers=bert), 404)
    assert shared.get(f"/v1/jobs/{job}", headers={**bert, **bearer(token)}).status_code == 200
    problem_of(shared.get("/v1/jobs", headers={**bert, **bearer(token)}), 403)


def test_only_who_may_change_a_job_makes_links_to_it(shared: TestClient) -> None:
    anna, bert = identified("anna", "staff", "vision"), identified("bert", "staff", "vision")
    job = submit(shared, anna, team="vision")["id"]
    problem_of(shared.post(f"/v1/jobs/{job}/links", json={}, headers=bert), 403)
    problem_of(shared.post(f"/v1/jobs/{job}/links", json={}, headers=identified("carl", "staff")), 404)


def test_a_link_ends_when_it_is_withdrawn_and_the_log_names_the_person(shared: TestClient, store: Store) -> None:
    anna = identified("anna", "staff")
    job = submit(shared, anna)["id"]
    link = make(shared, job, anna)
    listed = shared.get(f"/v1/jobs/{job}/links", headers=anna).json()
    assert [(item["id"], item["owner"], item["token"]) for item in listed["items"]] == [(link["id"], "anna", "")]
    assert listed["most_days"] == 30
    other = submit(shared, anna)["id"]
    problem_of(shared.delete(f"/v1/jobs/{other}/links/{link['id']}", headers=anna), 404)
    assert shared.delete(f"/v1/jobs/{job}/links/{link['id']}", headers=anna).status_code == 204
    problem_of(shared.get(f"/v1/jobs/{job}", headers=bearer(link["token"])), 401)
    problem_of(shared.delete(f"/v1/jobs/{job}/links/{link['id']}", headers=anna), 404)
    acts = [(entry.action, entry.actor, entry.target) for entry in store.audit.newest(20) if entry.action.startswith("key")]
    assert acts == [("key.revoke", "anna", link["id"]), ("key.create", "anna", link["id"])]


def test_a_link_expires(shared: TestClient, store: Store) -> None:
    anna = identified("anna", "staff")
    job = submit(shared, anna)["id"]
    assert make(shared, job, anna, 30)["expires"][:10] == (datetime.now(UTC) + timedelta(days=30)).date().isoformat()
    assert "give at most 30" in problem_of(shared.post(f"/v1/jobs/{job}/links", json={"days": 31}, headers=anna), 422)["detail"]
    old = store.keys.create("anna", {"read", f"job:{job}"}, datetime.now(UTC) - timedelta(seconds=1))[1]
    problem_of(shared.get(f"/v1/jobs/{job}", headers=bearer(old)), 401)
    assert len(shared.get(f"/v1/jobs/{job}/links", headers=anna).json()["items"]) == 1


def test_a_service_that_allows_none_makes_none(serve: Callable[..., TestClient], store: Store) -> None:
    client = serve(require_keys=True)
    key = bearer(store.keys.create("anna", {"read", "submit"})[1])
    job = submit(client, key)["id"]
    assert "--share-days" in problem_of(client.post(f"/v1/jobs/{job}/links", json={}, headers=key), 409)["detail"]
    assert client.get(f"/v1/jobs/{job}/links", headers=key).json() == {"items": [], "most_days": 0}
