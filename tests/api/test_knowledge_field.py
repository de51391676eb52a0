"""Measurements in a submission: checked, kept with the job, and not sent back."""

import json
from typing import Any

from starlette.testclient import TestClient

from autotune.evaluation.validation.row import Row, RowOutcome
from autotune.knowledge.bundle import content_of
from autotune.knowledge.measurement import measurements_of_rows
from storage.store import open_store
from tests.api.conftest import REQUEST

ROW = Row(
    line=1, row_id="a", source="lab", num_layers=4, hidden=512, heads=8, vocab=32000, seq_len=1024, gpu_type="A100 80GB",
    num_gpus=8, zero_stage=1, tp=1, pp=1, dp=8, micro_batch=1, global_batch=64, samples_per_s=80.0, outcome=RowOutcome.OK,
)  # fmt: skip


def content() -> dict[str, Any]:
    """Measurements as a request has them."""
    plain: dict[str, Any] = json.loads(json.dumps(content_of(measurements_of_rows([ROW], {"lab": "lab"}).measurements)))
    return plain


def test_measurements_stay_with_the_job(client: TestClient, database: str) -> None:
    answer = client.post("/v1/jobs", json=REQUEST | {"strategy": "guided", "knowledge": content()})
    assert answer.status_code == 202, answer.text
    job = answer.json()["id"]
    assert "knowledge" not in client.get(f"/v1/jobs/{job}").json()["request"]
    with open_store(database) as store:
        assert store.job(job).request["knowledge"] == content()


def test_damaged_measurements_are_refused(refusing: TestClient) -> None:
    broken = content()
    broken["measurements"][0]["columns"]["samples_per_s"] = -80.0
    for change, says in (
        ({"knowledge": broken}, "knowledge.measurements[0].columns"),
        ({"knowledge": {"settings": []}}, "does not have exactly settings and measurements"),
        ({"knowledge": "table.csv"}, "knowledge"),
        ({"knowledge": content(), "strategy": "tpe"}, "tpe does not use earlier trials"),
    ):
        answer = refusing.post("/v1/jobs", json=REQUEST | {"strategy": "guided"} | change)
        assert answer.status_code in (400, 422), answer.text
        assert says in answer.text
