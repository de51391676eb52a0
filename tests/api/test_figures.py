"""Figures of a job over the service."""

import pytest
from starlette.testclient import TestClient

from autotune.explain.figures import NAMES
from autotune.explain.figures.source import FigureSource
from storage.store import Store
from tests.api.conftest import measure, problem_of, submit


@pytest.mark.prove
def test_every_figure_has_its_sentence_and_its_tables(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    assert client.get(f"/v1/jobs/{job_id}/figures").json()["items"] == list(NAMES)
    empty = client.get(f"/v1/jobs/{job_id}/figures/time_breakdown").json()
    assert (empty["tables"], empty["summary"]) == ([], "The job waits for a worker: no trial has started.")
    measure(store, job_id, trials=5)
    for name in NAMES:
        figure = client.get(f"/v1/jobs/{job_id}/figures/{name}").json()
        assert (figure["name"], bool(figure["title"]), bool(figure["summary"])) == (name, True, True)
        for table in figure["tables"]:
            assert len({len(column["values"]) for column in table["columns"]}) == 1
    breakdown = client.get(f"/v1/jobs/{job_id}/figures/time_breakdown").json()
    assert {"seconds", "share"} <= {column["name"] for column in breakdown["tables"][0]["columns"]}


def test_figures_are_made_once_for_a_state_of_the_job(
    client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    class Counted(FigureSource):
        def __init__(self, store: Store, job_id: str) -> None:
            made.append(job_id)
            super().__init__(store, job_id)

    monkeypatch.setattr("api.routes.figures.FigureSource", Counted)
    job_id = submit(client)["id"]
    for name in ("timeline", "timeline", "best_so_far"):
        assert client.get(f"/v1/jobs/{job_id}/figures/{name}").status_code == 200
    assert made == [job_id]
    client.post(f"/v1/jobs/{job_id}/pause")
    client.get(f"/v1/jobs/{job_id}/figures/timeline")
    assert made == [job_id, job_id]


@pytest.mark.prove
def test_the_explanation_and_the_report(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    assert "has no winner to explain" in problem_of(client.get(f"/v1/jobs/{job_id}/explanation"), 404)["detail"]
    measure(store, job_id, trials=3)
    told = client.get(f"/v1/jobs/{job_id}/explanation").json()
    assert (told["job"], told["measured"]) == (job_id, 3)
    page = client.get(f"/v1/jobs/{job_id}/report")
    # A file, no page of this server: nothing in it may run here.
    assert (page.headers["content-type"], page.text.startswith("<!doctype html>")) == ("application/octet-stream", True)
    assert client.get(f"/v1/jobs/{job_id}/report", params={"format": "md"}).text.startswith("# ")
    assert "use html or md" in problem_of(client.get(f"/v1/jobs/{job_id}/report", params={"format": "pdf"}), 404)["detail"]


@pytest.mark.prove
def test_a_figure_that_is_none(client: TestClient) -> None:
    job_id = submit(client)["id"]
    assert "did you mean timeline" in problem_of(client.get(f"/v1/jobs/{job_id}/figures/timelin"), 422)["detail"]
    problem_of(client.get(f"/v1/jobs/{job_id}/figures/..%2f"), 404)
    problem_of(client.get(f"/v1/jobs/{job_id}/figures/<b>"), 422)


@pytest.mark.prove
def test_where_a_step_goes(client: TestClient, store: Store) -> None:
    job_id = submit(client)["id"]
    measure(store, job_id, trials=2)
    told = client.get(f"/v1/jobs/{job_id}/trials/1/parts").json()
    assert told["step_seconds"] == pytest.approx(8 / 101)
    assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["step_seconds"])
    assert sum(part["share"] for part in told["parts"]) == pytest.approx(1)
    assert told["note"].startswith("by ")
    problem_of(client.get(f"/v1/jobs/{job_id}/trials/2/parts"), 404)
