"""Submitted commands: only those that the server was started with."""

from typing import Any

import pytest

from autotune.errors import RequestError
from autotune.request.field_forms import parse_allowed
from search_spaces.outcome import JobState
from storage.store import Store
from tests.api.conftest import problem_of

ALLOWED = ("/srv/project:python train.py",)
COMMAND = {"arguments": ["python", "train.py", "--batch", "{micro_batch_size}"], "folder": "/srv/project"}
BODY = {"ranks": 2, "trials": 3, "global_batch_size": 8}


def test_an_allowed_command_is_a_job(serve, store: Store) -> None:
    client = serve(commands=ALLOWED)
    answer = client.post("/v1/jobs", json=BODY | {"command": COMMAND | {"folder": "/srv/project/"}})
    assert answer.status_code == 202, answer.text
    request = answer.json()["request"]
    assert (request["model"], request["engine"], request["command"]["folder"]) == ("train.py", "command", "/srv/project")
    assert store.jobs.newest()[0].request["resolved_model"]["arguments"] == COMMAND["arguments"]


@pytest.mark.prove(every=7)
@pytest.mark.parametrize(
    "changes",
    [
        {"folder": "/srv"}, {"folder": "/srv/project/../other"}, {"arguments": ["python", "other.py"]},
        {"arguments": ["bash", "-c", "id"]}, {"arguments": ["python"]}, {"arguments": []},
        {"environment_knobs": {"LD_PRELOAD": ["/tmp/x.so"]}}, {"environment_knobs": {"PYTHONPATH": ["/tmp"]}},
        {"pattern": "("}, {"launcher": "mpi"}, {"arguments": [*COMMAND["arguments"], "{secret}"]},
    ],
    ids=str,
)  # fmt: skip
def test_no_other_is(serve, store: Store, changes: dict[str, Any]) -> None:
    client = serve(commands=ALLOWED)
    problem_of(client.post("/v1/jobs", json=BODY | {"command": COMMAND | changes}), 422)
    assert store.jobs.newest() == []


def test_none_is_without_the_setting(client, store: Store) -> None:
    refused = problem_of(client.post("/v1/jobs", json=BODY | {"command": COMMAND}), 422)
    assert refused["errors"][0]["field"] == "command"
    assert "--allow-command" in refused["errors"][0]["remedy"]
    problem_of(client.post("/v1/jobs", json=BODY), 422)
    assert store.jobs.newest() == []


@pytest.mark.parametrize("text", ["python train.py", "srv:python", "/srv:", "/srv:python 'x"])
def test_a_setting_that_is_none_is_told(text: str) -> None:
    with pytest.raises(RequestError, match="is not FOLDER:COMMAND"):
        parse_allowed(text)


@pytest.mark.prove
def test_a_list_that_became_shorter_holds_for_clones_and_for_what_is_resumed(serve, store: Store) -> None:
    job = serve(commands=ALLOWED).post("/v1/jobs", json=BODY | {"command": COMMAND}).json()["id"]
    serve(commands=ALLOWED).post(f"/v1/jobs/{job}/pause")
    shorter = serve(commands=("/srv/other:python",))
    for asked in ("clone", "resume"):
        refused = problem_of(shorter.post(f"/v1/jobs/{job}/{asked}"), 422)
        assert refused["errors"][0]["field"] == "command"
    assert [(found.id, found.state) for found in store.jobs.newest()] == [(job, JobState.PAUSED)]
    assert serve(commands=ALLOWED).post(f"/v1/jobs/{job}/resume").status_code == 202
    assert serve(commands=ALLOWED).post(f"/v1/jobs/{job}/clone").status_code == 202
