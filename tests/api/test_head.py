"""HEAD requests are answered like GET requests, without a body."""

import pytest
from starlette.testclient import TestClient

from tests.api.conftest import submit


@pytest.mark.prove(every=7)
@pytest.mark.parametrize(
    "path", ["/", "/page/main.mjs", "/livez", "/v1/jobs", "/v1/jobs/{job}", "/v1/jobs/20260101-000000-aaaa", "/v1/nowhere"]
)
def test_as_get_without_a_body(client: TestClient, path: str) -> None:
    path = path.format(job=submit(client)["id"])
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    changing = {"date", "etag"}  # the time that a job has run is in its tag
    assert {n: v for n, v in head.headers.items() if n not in changing} == {
        n: v for n, v in get.headers.items() if n not in changing
    }


def test_a_stream_ends_after_its_headers(client: TestClient) -> None:
    job = submit(client)["id"]
    for stream in (f"/v1/jobs/{job}/events/stream",):
        answer = client.head(stream)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")


def test_what_only_changes_is_refused(client: TestClient) -> None:
    answer = client.head(f"/v1/jobs/{submit(client)['id']}/pause")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert "HEAD" in client.post("/v1/jobs/20260101-000000-aaaa", json={}).headers["allow"]
