"""`POST /v1/fits`: what `autotune fit` answers, over HTTP."""

from typing import Any

import pytest
from fastapi.testclient import TestClient

from autotune.client.fields import FIT
from autotune.question.question import METHODS

ASKED = {"model": "llama-2-7b", "cluster": "1x4090", "sequence_length": 2048}


def fits(client: TestClient, **body: object) -> dict[str, Any]:
    answer = client.post("/v1/fits", json=ASKED | body)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_ways_are_compared_and_the_fastest_has_a_file(client: TestClient) -> None:
    document = fits(client, dataset_rows=50_000, epochs=3.0, program="trl", dataset="my/data")
    fastest = document["setups"][document["fastest"]]
    assert {setup["method"] for setup in document["setups"]} == {*METHODS}
    assert fastest["fits"] and fastest["predicted"]["fit_probability"] >= document["fit_probability"]
    assert fastest["hours"]["low"] < fastest["hours"]["mean"] < fastest["hours"]["high"]
    assert document["samples_of_run"] == 150_000
    assert "dataset_name: my/data" in document["file"]["text"]
    assert document["file"]["notes"][0].startswith("start it by: trl sft")
    assert [item["name"] for item in document["assumed"] if item["name"] == "lora_rank"]
    whole, fused = (fits(client, methods=["lora"], libraries=words)["setups"][0] for words in ([], ["loss=projection"]))
    assert fused["least_bytes"] < whole["least_bytes"]
    plain = fits(client, methods=["qlora"], global_batch_size=32)
    assert (plain["file"], plain["global_batch_size"]) == (None, 32)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"methods": ["none"]}, "methods"),
        ({"program": "keras"}, "program"),
        ({"libraries": ["loss=cheap"]}, "libraries"),
        ({"program": "../x"}, "program"),
        ({"dataset": "a b; rm"}, "dataset"),
        ({"epochs": 2.0}, "dataset_rows"),
        ({"cards": ["1x4090"]}, "cards"),
        ({"cluster": "2x24"}, "cluster"),
        ({"model": "mine:factory"}, "model"),
    ],
)
def test_what_is_wrong_is_named(client: TestClient, body: dict[str, object], field: str) -> None:
    answer = client.post("/v1/fits", json=ASKED | body)
    assert answer.status_code == 422, answer.text
    assert field in answer.text


def test_a_service_takes_no_paths_and_no_list_of_machines() -> None:
    assert not {"cards", "host_memory", "nvme_path", "ray_address"} & {*FIT}
