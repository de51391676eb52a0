"""Measurements in a submission: checked, kept with the job, and not sent back."""

import dataclasses
import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from autotune.knowledge.content import content_of
from autotune.knowledge.measurement import measurements_of_rows
from autotune.knowledge.row import RowOutcome, TableRow
from autotune.session.knowledge import MOST
from storage.store import open_store
from tests.api.conftest import REQUEST

ROW = TableRow(
    line=1, row_id="a", source="lab", num_layers=4, hidden=512, heads=8, vocab=32000, seq_len=1024, gpu_type="A100 80GB",
    num_gpus=8, zero_stage=1, tp=1, pp=1, dp=8, micro_batch=1, global_batch=64, samples_per_s=80.0, outcome=RowOutcome.OK,
)  # fmt: skip


def content() -> dict[str, Any]:
    """Measurements as a request has them."""
    plain: dict[str, Any] = json.loads(json.dumps(content_of(measurements_of_rows([ROW]).measurements)))
    return plain


def test_measurements_stay_with_the_job(client: TestClient, database: str) -> None:
    answer = client.post("/v1/jobs", json=REQUEST | {"strategy": "guided", "knowledge": content()})
    assert answer.status_code == 202, answer.text
    job = answer.json()["id"]
    assert "knowledge" not in client.get(f"/v1/jobs/{job}").json()["request"]
    with open_store(database) as store:
        assert store.jobs.get(job).request["knowledge"] == content()


def test_predictions_and_plans_learn_from_measurements(refusing: TestClient) -> None:
    asked = {"model": "llama-3-8b", "cluster": "dgx-a100", "global_batch_size": 64, "sequence_length": 1024}
    seconds = {}
    for name, field in (("without", {}), ("with", {"knowledge": content()})):
        predicted = refusing.post("/v1/predictions", json=asked | field)
        planned = refusing.post("/v1/plans", json=asked | field | {"space": "zero", "top": 1})
        assert (predicted.status_code, planned.status_code) == (200, 200), predicted.text + planned.text
        assert predicted.json()["calibration_source"] == planned.json()["calibration_source"]
        assert ("measurements of 1 source by others (1 on the same devices)" in predicted.json()["calibration_source"]) == bool(
            field
        )
        seconds[name] = [answer.json() for answer in (predicted, planned)]
    before, after = (seconds[name][0]["predicted"]["step_seconds"] for name in ("without", "with"))
    assert before != after
    broken = {"settings": [], "measurements": [{"columns": {}}]}
    for path in ("/v1/predictions", "/v1/plans"):
        answer = refusing.post(path, json=asked | {"knowledge": broken})
        assert answer.status_code == 422, answer.text
        assert "knowledge.measurements[0]" in answer.text


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


@pytest.mark.prove
def test_as_many_measurements_as_a_job_keeps_go_into_a_body(client: TestClient) -> None:
    rows = [dataclasses.replace(ROW, row_id=str(number), samples_per_s=80 + number / 100) for number in range(MOST)]
    many = content_of(measurements_of_rows(rows).measurements)
    assert len(many["measurements"]) == MOST
    answer = client.post("/v1/jobs", json=REQUEST | {"strategy": "guided", "knowledge": many})
    assert answer.status_code == 202, answer.text


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ({"knowledge": {"settings": [1] * 40_000}}, "knowledge.settings.0: 1 is not an object"),
        (
            {"knowledge": {str(number): [] for number in range(10_000)}},
            "knowledge: has 10,000 fields; give settings and measurements",
        ),
        ({"knowledge": {"settings": [{}] * 60_000}}, "body: holds more than 50,000 values; give fewer"),
        ({"knowledge": {}, "pins": {"zero_stage": [1] * 6_000}}, "body: holds more than 5,000 values; give fewer"),
    ],
)
def test_many_values_that_are_no_measurements_get_one_line(refusing: TestClient, body: dict[str, Any], line: str) -> None:
    answer = refusing.post("/v1/jobs", json=REQUEST | {"strategy": "guided"} | body)
    assert answer.status_code in (400, 422), answer.text
    assert line in answer.text
    assert len(answer.text) < 500
