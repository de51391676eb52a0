"""Forty people in three teams, whom a proxy has identified: who sees which jobs, and who may do what with them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.app import with_routes
from api.reference import roles as api_roles
from storage.store import Store
from tests.api.conftest import BASE, REQUEST, problem_of, service, submit

PROXY = "10.1.0.7"
TEAMS = ("vision", "language", "speech")
PEOPLE = {f"person{number:02}@example.com": TEAMS[number % 3] if number < 39 else "" for number in range(40)}
NAME, GROUPS = "X-Auth-Request-Email", "X-Auth-Request-Groups"
ROLES = {"reader": "read", "observer": "observe", "submitter": "submit", "operator": "operate", "administrator": "admin"}

SETTINGS: dict[str, Any] = {
    "require_keys": True, "trusted_proxies": ("10.1.0.0/16",), "identity_header": NAME, "groups_header": GROUPS,
    "roles": ("staff=read", "staff=submit", *(f"{group}={role}" for group, role in ROLES.items())),
}  # fmt: skip


def identified(name: str, *groups: str) -> dict[str, str]:
    return {NAME: name, GROUPS: ",".join(filter(None, groups))}


@pytest.fixture
def proxy(serve: Callable[..., TestClient]) -> TestClient:
    """The proxy, as the service sees it."""
    client = serve(**SETTINGS)
    return TestClient(client.app, base_url=BASE, client=(PROXY, 40_000), raise_server_exceptions=False)


def test_everybody_sees_their_own_jobs_and_those_of_their_team(proxy: TestClient) -> None:
    jobs = {
        name: submit(proxy, identified(name, "staff", team), **({"team": team} if team else {}))["id"]
        for name, team in PEOPLE.items()
    }
    for name, team in PEOPLE.items():
        shown = proxy.get("/v1/jobs?limit=100", headers=identified(name, "staff", team)).json()["items"]
        expected = {job for other, job in jobs.items() if other == name or (team and PEOPLE[other] == team)}
        assert {item["id"] for item in shown} == expected
        assert all(item["request"].get("team", "") == team for item in shown)
    assert len(proxy.get("/v1/jobs?limit=100", headers=identified("lead", "observer")).json()["items"]) == 40


ROUTES = {route: role for route, role in api_roles(with_routes()).items() if "{job_id}" in route} | {"GET /v1/audit": "admin"}
BODIES = {"PATCH /v1/jobs/{job_id}": {"note": "seen"}, "POST /v1/jobs/{job_id}/links": {"days": 1}}
SEES_ALL = ("observer", "operator", "administrator")


def refusal(needed: str, role: str, relation: str) -> int:
    """What the documentation says of this cell: the status of its refusal, 0 if it is allowed."""
    if role == "administrator":
        return 0
    allowed = {
        "read": ("reader", "observer", "operator"), "submit": ("submitter",), "submit or operate": ("submitter", "operator"),
        "admin": (),
    }  # fmt: skip
    if role not in allowed[needed]:
        return 403
    if relation == "stranger" and role not in SEES_ALL:
        return 404
    return 403 if needed == "submit or operate" and relation == "team" and role != "operator" else 0


@pytest.fixture(scope="module")
def of_the_matrix(tmp_path_factory: pytest.TempPathFactory, migrated: Path) -> Iterator[TestClient]:
    """The proxy, for all cells: each has a job of its own."""
    database = shutil.copy(migrated, tmp_path_factory.mktemp("matrix") / "jobs.db")
    with service(str(database), share_days=30, **SETTINGS) as client:
        yield TestClient(client.app, base_url=BASE, client=(PROXY, 40_000), raise_server_exceptions=False)


@pytest.mark.prove(every=13)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("relation", ["own", "team", "stranger"])
@pytest.mark.parametrize("role", ROLES)
def test_each_cell_of_the_matrix(of_the_matrix: TestClient, role: str, relation: str, route: str) -> None:
    """Every route about a job, for every role and relation to the job's owner."""
    client = of_the_matrix
    name, team = ("anna", "") if relation == "own" else ("bert", "vision" if relation == "team" else "speech")
    owner = identified(name, "staff", team)
    job = submit(client, owner, team=team)["id"]
    link = client.post(f"/v1/jobs/{job}/links", json={"days": 1}, headers=owner).json()["id"]
    if "stream" in route:  # which ends with the job
        client.post(f"/v1/jobs/{job}/cancel", headers=owner)
    method, _, path = route.partition(" ")
    path = path.format(job_id=job, link_id=link, number=0, name="best_so_far")
    if "differences" in path:
        path += "?other=1"
    answer = client.request(method, path, json=BODIES.get(route), headers=identified("anna", role, "vision"))
    status = refusal(ROUTES[route], role, relation)
    if status == 404:
        assert "there is no job" in problem_of(answer, status)["detail"]
    elif status:
        problem_of(answer, status)
    else:
        # A job that was just submitted has no trials yet, and is in no state to be resumed.
        assert answer.is_success or answer.status_code in (404, 409), answer.text
        assert "there is no job" not in answer.text


def test_the_matrix_allows_and_refuses() -> None:
    """Its table has both, for links too, so that a route in a wrong column is seen."""
    for route, needed in ROUTES.items():
        cells = {refusal(needed, role, relation) for role in ROLES for relation in ("own", "team", "stranger")}
        assert cells == ({0, 403} if needed == "admin" else {0, 403, 404}), route
    assert sum("/links" in route for route in ROUTES) == 3


def test_a_name_counts_from_a_trusted_proxy_alone(proxy: TestClient, store: Store) -> None:
    key = {"Authorization": f"Bearer {store.keys.create('anna', {'read'})[1]}"}
    for address in ("10.2.0.7", "127.0.0.1", "203.0.113.9", "testclient"):
        other = TestClient(proxy.app, base_url=BASE, client=(address, 40_000))
        for headers in (identified("root", "administrator"), {NAME.lower(): "root"}, {**key, NAME: "root"}, {NAME: ""}):
            assert "does not come from a trusted proxy" in problem_of(other.get("/v1/jobs", headers=headers), 403)["detail"]
        forwarded = {**identified("root", "administrator"), "X-Forwarded-For": PROXY}
        problem_of(other.get("/v1/jobs", headers=forwarded), 403)
        assert other.get("/v1/jobs", headers=key).status_code == 200
        problem_of(other.get("/v1/jobs", headers={GROUPS: "administrator"}), 401)
    problem_of(proxy.get("/v1/jobs"), 401)
    assert proxy.get("/v1/jobs", headers=key).status_code == 200
    # What the person's browser said of itself does not replace what the proxy says of the person.
    assert proxy.get("/v1/audit", headers={**identified("root", "administrator"), **key}).status_code == 200


@pytest.mark.parametrize("names", [["anna", "root"], [""], ["x" * 65], ["an\tna"]])
def test_a_name_that_is_none_is_refused(proxy: TestClient, names: list[str]) -> None:
    headers = [(NAME, name) for name in names]
    assert "is not one name" in problem_of(proxy.get("/v1/jobs", headers=headers), 400)["detail"]


def test_a_page_of_another_site_changes_nothing_with_the_proxys_cookie(proxy: TestClient) -> None:
    person = identified("anna", "staff")
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        problem_of(proxy.post("/v1/jobs", json=REQUEST, headers={**person, **headers}), 403)
    assert proxy.post("/v1/jobs", json=REQUEST, headers={**person, "Origin": BASE}).status_code == 202


def test_a_job_is_shown_to_ones_own_teams_only(proxy: TestClient) -> None:
    person = identified("anna", "staff", "vision")
    for body in ({"team": "speech"}, {"team": "administrator"}):
        detail = problem_of(proxy.post("/v1/jobs", json=REQUEST | body, headers=person), 422)["detail"]
        assert "is not one of yours (staff, vision)" in detail
    job = submit(proxy, person)["id"]
    colleague = identified("bert", "staff", "vision")
    problem_of(proxy.get(f"/v1/jobs/{job}", headers=colleague), 404)
    assert proxy.patch(f"/v1/jobs/{job}", json={"team": "vision"}, headers=person).status_code == 200
    assert proxy.get(f"/v1/jobs/{job}", headers=colleague).status_code == 200
    problem_of(proxy.patch(f"/v1/jobs/{job}", json={"team": "speech"}, headers=person), 422)
    assert proxy.patch(f"/v1/jobs/{job}", json={"team": ""}, headers=person).status_code == 200
    problem_of(proxy.get(f"/v1/jobs/{job}", headers=colleague), 404)


def test_a_clone_is_the_cloners_and_is_shown_to_no_team_that_is_not_theirs(proxy: TestClient) -> None:
    job = submit(proxy, identified("anna", "staff", "vision"), team="vision")["id"]
    clone = proxy.post(f"/v1/jobs/{job}/clone", headers=identified("root", "administrator")).json()
    assert (clone["submitter"], clone["request"].get("team", "")) == ("root", "")
    clone = proxy.post(f"/v1/jobs/{job}/clone", headers=identified("bert", "staff", "vision")).json()
    assert (clone["submitter"], clone["request"]["team"]) == ("bert", "vision")


def test_the_audit_log_names_the_person(proxy: TestClient, store: Store) -> None:
    submit(proxy, identified("anna", "staff"))
    entry = next(entry for entry in store.audit.newest(5) if entry.action == "job.submit")
    assert entry.actor == "anna"


def test_a_key_may_name_teams(proxy: TestClient, store: Store) -> None:
    job = submit(proxy, identified("anna", "staff", "vision"), team="vision")["id"]
    key = {"Authorization": f"Bearer {store.keys.create('robot', {'read', 'team:vision'})[1]}"}
    assert proxy.get(f"/v1/jobs/{job}", headers=key).status_code == 200
