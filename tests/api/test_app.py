"""The service, asked through ASGI as a server asks it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from api.app import create_app
from search_spaces.outcome import JobState, Outcome, Purpose
from search_spaces.trial import TrialResult
from search_spaces.trial_config import TrialConfig
from storage.errors import DatabaseUnavailableError
from storage.owners import current_owner
from storage.sql import open_store


async def _ask(app: FastAPI, method: str, url: str) -> tuple[int, dict[str, str], Any]:
    parts, sent = urlsplit(url), []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": parts.path,
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "headers": [],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def ask(app: FastAPI, url: str, method: str = "GET") -> tuple[int, dict[str, str], Any]:
    return asyncio.run(_ask(app, method, url))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database with three jobs, the first of which has two trials."""
    path = tmp_path / "jobs.db"
    with open_store(str(path)) as store:
        ids = [store.create_job({"model": f"model-{index}"}).id for index in range(3)]
        lease = store.acquire(ids[0], current_owner())
        store.add_trial(lease, TrialConfig(), Purpose.SEARCH)
        result = TrialResult(attempt=store.start_attempt(lease, 0).token, outcome=Outcome.WRONG, losses=(1.0, float("nan")))
        store.finish_attempt(lease, result)
        store.add_trial(lease, TrialConfig(zero_stage=1), Purpose.SEARCH)
        store.release(lease, JobState.PAUSED, "asked", "stopped by a person")
    return path


@pytest.fixture
def app(database: Path) -> Iterator[FastAPI]:
    app = create_app(str(database))
    yield app

    async def shut_down() -> None:
        async with app.router.lifespan_context(app):
            pass

    asyncio.run(shut_down())


def test_lives(app: FastAPI) -> None:
    assert ask(app, "/livez")[::2] == (200, {"status": "ok"})


def test_pages_jobs_newest_first(app: FastAPI) -> None:
    first = ask(app, "/v1/jobs?limit=2")[2]
    second = ask(app, f"/v1/jobs?limit=2&before={first['next']}")[2]

    assert [job["request"]["model"] for job in first["items"] + second["items"]] == ["model-2", "model-1", "model-0"]
    assert second["next"] is None


def test_reads_a_job_its_trials_and_its_events(app: FastAPI) -> None:
    job_id = ask(app, "/v1/jobs")[2]["items"][-1]["id"]

    job = ask(app, f"/v1/jobs/{job_id}")[2]
    assert (job["state"], job["reason"], job["owner"]) == ("PAUSED", "asked", None)
    trials = ask(app, f"/v1/jobs/{job_id}/trials")[2]["items"]
    assert [(trial["number"], trial["outcome"]) for trial in trials] == [(0, "WRONG"), (1, None)]
    assert trials[0]["result"]["losses"] == [1.0, None]
    events = ask(app, f"/v1/jobs/{job_id}/events?after=2&limit=3")[2]
    assert [event["sequence"] for event in events["items"]] == [3, 4, 5]
    assert events["next"] == 5


@pytest.mark.parametrize("url", ["/v1/jobs/nothing", "/v1/jobs/nothing/trials", "/v1/jobs/nothing/events", "/v1/jobs?before=x"])
def test_an_unknown_job_is_a_problem(app: FastAPI, url: str) -> None:
    status, headers, body = ask(app, url)

    assert status == 404
    assert headers["content-type"] == "application/problem+json"
    assert (body["status"], body["title"]) == (404, "Not Found")
    assert "there is no job" in body["detail"]


@pytest.mark.parametrize("query", ["limit=0", "limit=many", "limit=1001"])
def test_a_bad_parameter_names_its_field(app: FastAPI, query: str) -> None:
    status, headers, body = ask(app, f"/v1/jobs?{query}")

    assert (status, headers["content-type"]) == (422, "application/problem+json")
    assert [error["field"] for error in body["errors"]] == ["query.limit"]


@pytest.mark.parametrize(("method", "url", "status"), [("GET", "/nowhere", 404), ("POST", "/v1/jobs", 405)])
def test_refusals_of_the_framework_are_problems(app: FastAPI, method: str, url: str, status: int) -> None:
    answer, headers, body = ask(app, url, method)

    assert (answer, headers["content-type"], body["status"]) == (status, "application/problem+json", status)


def test_a_lost_database_is_a_problem_without_its_path(app: FastAPI, database: Path) -> None:
    database.write_bytes(b"no database any more" * 100)
    status, _, body = ask(app, "/v1/jobs")

    assert status == 503
    assert str(database) not in body["detail"]


def test_a_database_that_cannot_be_opened_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailableError, match="is a folder"):
        create_app(str(tmp_path))


def test_every_operation_is_described(app: FastAPI) -> None:
    paths = app.openapi()["paths"]

    assert {path: list(methods) for path, methods in paths.items()} == {
        "/livez": ["get"],
        "/v1/jobs": ["get"],
        "/v1/jobs/{job_id}": ["get"],
        "/v1/jobs/{job_id}/trials": ["get"],
        "/v1/jobs/{job_id}/events": ["get"],
    }
