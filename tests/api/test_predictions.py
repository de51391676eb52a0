"""Predictions and plans over HTTP: what they answer, what they refuse, and that they stay within bounds."""

from typing import Any

import pytest
from starlette.testclient import TestClient

ASKED = {"model": "llama-3-8b", "cluster": "dgx-h100", "sequence_length": 4096, "global_batch_size": 64}
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512,
    "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def client(refusing: TestClient) -> TestClient:
    """One service for all: nothing of what is asked here is kept."""
    return refusing


def problem(client: TestClient, path: str, status: int = 422, **fields: Any) -> dict[str, Any]:
    answer = client.post(path, json=ASKED | fields)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    return body


def test_a_prediction_sums_up(client: TestClient) -> None:
    config = {"pipeline_parallel_size": 4, "zero_stage": 1, "activation_checkpointing": "full"}
    answer = client.post("/v1/predictions", json=ASKED | {"config": config})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    told = body["predicted"]
    assert (body["model"], body["world_size"], body["engine"]) == ("llama-3-8b", 8, "native")
    assert body["config"].items() >= config.items()
    assert sum(told["breakdown_seconds"].values()) == pytest.approx(told["step_seconds"])
    assert told["samples_per_second"]["mean"] == pytest.approx(64 / told["step_seconds"])
    assert told["step_seconds_band"]["low"] < told["step_seconds"] < told["step_seconds_band"]["high"]
    assert sum(rank["layers"] for rank in told["peak_memory_bytes"]) == 32
    assert max(rank["total"] for rank in told["peak_memory_bytes"]) == pytest.approx(told["peak_memory_band"]["mean"])
    assert 0 <= told["fit_probability"] <= 1
    assert body["origins"]["cluster"] == {"source": "stated", "by": "--cluster"}
    assert body["origins"]["zero_stage"]["source"] == "stated"


def test_an_alternative_is_what_is_predicted_for_it(client: TestClient) -> None:
    pinned = {
        "micro_batch_size": 1, "activation_checkpointing": "none", "zero_stage": 3, "precision": "bf16", "reduce_dtype": "fp32",
        "accumulation_dtype": "fp32",
    }  # fmt: skip
    asked = {name: value for name, value in ASKED.items() if name != "sequence_length"} | {"config": pinned}
    assumed = {item["name"]: item for item in client.post("/v1/predictions", json=asked).json()["assumed"]}
    assert assumed.keys() == {"sequence_length"}
    for answer in assumed["sequence_length"]["alternatives"]:
        stated = client.post("/v1/predictions", json=asked | {"sequence_length": answer["value"]}).json()
        (rank,) = stated["predicted"]["peak_memory_bytes"]
        assert answer["peak_memory_bytes"] == pytest.approx(rank["total"] - rank["by_tag"]["reserved"])
        assert answer["tokens_per_second"] == pytest.approx(stated["predicted"]["tokens_per_second"])
        assert stated["assumed"] == []


def test_a_plan_says_what_its_first_row_is_at_the_alternatives(client: TestClient) -> None:
    asked = {"model": "llama-3-8b", "cluster": "dgx-h100", "space": "zero", "top": 2}
    body = client.post("/v1/plans", json=asked).json()
    assert {item["name"] for item in body["assumed"]} == {"sequence_length", "global_batch_size"}
    shorter = next(item for item in body["assumed"] if item["name"] == "sequence_length")["alternatives"][0]
    assert shorter["value"] < body["sequence_length"]
    assert shorter["peak_memory_bytes"] < body["plans"][0]["predicted"]["peak_memory_band"]["mean"]


def test_an_uploaded_model_is_predicted(client: TestClient) -> None:
    model = {"name": "mine", "config": CONFIG}
    answer = client.post("/v1/predictions", json={"model": model, "cluster": "dgx-a100", "lora_rank": 8, "frozen_bits": 4})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["model"], answer.json()["sequence_length"]) == ("mine", 512)


def test_uneven_loads_of_experts_take_longer(client: TestClient) -> None:
    asked = ASKED | {"model": "mixtral-8x7b", "config": {"expert_parallel_size": 8}}
    even, uneven = (
        client.post("/v1/predictions", json=asked | loads).json()["predicted"]["step_seconds"]
        for loads in ({}, {"expert_loads": [[3.0, *[1.0] * 7]]})
    )
    assert uneven > 1.1 * even


def test_plans_are_ranked_with_reasons(client: TestClient) -> None:
    answer = client.post("/v1/plans", json=ASKED | {"space": "3d", "top": 3, "price": 2.0})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    first, *others = (plan["predicted"]["samples_per_second"] for plan in body["plans"])
    assert len(others) == 2
    # Unusual values are not first unless they are certainly faster; each further row shows the simplest of what ties.
    assert all(other["mean"] <= first["high"] for other in others)
    assert others[1]["mean"] <= others[0]["mean"] * (1 + body["resolution"])
    assert body["configurations"] >= body["fitting"] > 100
    assert body["max"] is None
    for plan in body["plans"]:
        assert plan["cost_per_million_tokens"] > 0
        assert {"zero_stage", "activation_checkpointing"} <= {reason["knob"] for reason in plan["reasons"]}
        assert len(plan["predicted"]["peak_memory_bytes"]) == 1


def test_plans_for_goodput_say_how_to_run_them(client: TestClient) -> None:
    fields = {"objective": "goodput", "goodput": {"failures": "rsc1", "spares": [0, 1], "tokens": 1e12}, "price": 2, "top": 2}
    body = client.post("/v1/plans", json=ASKED | fields | {"space": "zero"}).json()
    for plan in body["plans"]:
        best = plan["goodput"][0]
        assert best["failures"] == "rsc1"
        assert best["spares"] in (0, 1)
        assert best["cost"] == pytest.approx(2 * best["hours"] * best["devices"])
        assert best["tokens"] / best["tokens_kept_per_second"] == pytest.approx(best["hours"] * 3600)
    kept = [plan["goodput"][0]["tokens_kept_per_device_hour"] for plan in body["plans"]]
    assert kept == sorted(kept, reverse=True)


@pytest.mark.prove
def test_the_largest_is_planned_for(client: TestClient) -> None:
    pins = {"checkpoint_every_k": 1, "pipeline_schedule": "1f1b"}
    body = client.post("/v1/plans", json=ASKED | {"max": "sequence_length", "top": 1, "pins": pins, "space": "3d"}).json()
    assert body["max"]["dimension"] == "sequence_length"
    assert body["max"]["value"] == body["sequence_length"] < body["max"]["next"]


@pytest.mark.prove(every=3)
@pytest.mark.parametrize(
    ("path", "fields", "field", "remedy"),
    [
        ("/v1/predictions", {"config": {"tensor_parallel_size": 3}}, "config.tensor_parallel_size", "choose degrees"),
        ("/v1/predictions", {"config": {"zero_stag": 3}}, "config.zero_stag", "did you mean"),
        ("/v1/predictions", {"config": {"zero_stage": 7}}, "config.zero_stage", "give 0, 1, 2 or 3"),
        ("/v1/predictions", {"config": {"offload_param": "nvme", "zero_stage": 3}}, "config.offload_param", "use cpu"),
        ("/v1/predictions", {"engine": "ddp", "config": {"zero_stage": 1}}, "config.zero_stage", "leave the knob"),
        ("/v1/predictions", {"cluster": "dgx-a100", "config": {"precision": "fp8"}}, "config.precision", "use precision=bf16"),
        ("/v1/predictions", {"model": "llama-9"}, "model", "did you mean"),
        ("/v1/predictions", {"model": "./confg.json"}, "model", "give {config: …} with the content"),
        ("/v1/predictions", {"cluster": "8xfoo"}, "cluster", "or give 8xMEMORY"),
        ("/v1/predictions", {"cluster": "8xh100:x"}, "cluster", "write 8xh100:4 for 4 nodes"),
        ("/v1/plans", {"cluster": "2x8xh100:3"}, "cluster", "write 8xh100:2"),
        ("/v1/plans", {"cluster": "dgx-h10"}, "cluster", "COUNTxDEVICE (8xh100)"),
        ("/v1/predictions", {"model": "os:system"}, "model", "give a preset"),
        ("/v1/predictions", {"model": "/etc/passwd"}, "model", "config.json"),
        ("/v1/predictions", {"cluster": "/etc/passwd"}, "cluster", "GET /v1/clusters"),
        ("/v1/predictions", {"ranks": 5}, "ranks", "leave it out"),
        ("/v1/predictions", {"engine": "megatron"}, "engine", "use one of"),
        ("/v1/predictions", {"frozen_bits": 4}, "frozen_bits", "lora_rank"),
        ("/v1/predictions", {"lora_rank": 4, "lora_targets": ["queries"]}, "lora_targets", "name some of"),
        ("/v1/predictions", {"model": "gpt2", "sequence_length": 4096}, "sequence_length", "at most 1024"),
        (
            "/v1/predictions",
            {"training_steps": 1000, "config": {"curriculum_start_length": 8192, "curriculum_steps": 100}},
            "config.curriculum_start_length",
            "below --sequence-length",
        ),
        ("/v1/predictions", {"config": {"random_ltd_start_tokens": 64}}, "config.random_ltd_start_tokens", "--training-steps"),
        ("/v1/predictions", {"expert_loads": [[1.0, 1.0]]}, "expert_loads", "leave it out"),
        ("/v1/plans", {"model": "mixtral-8x7b", "expert_loads": [[1.0] * 3]}, "expert_loads", "one number for each expert"),
        ("/v1/predictions", {"document_lengths": [2**20]}, "document_lengths", "raise the sequence length"),
        (
            "/v1/predictions",
            {"document_lengths": [64, 9], "config": {"pack_sequences": True, "compile_blocks": True}},
            "config.pack_sequences",
            "set pack_sequences=false",
        ),
        ("/v1/plans", {"space": "./mine.toml"}, "space", "use one of"),
        ("/v1/plans", {"pins": {"tensor_parallel_size": 3}}, "pins.tensor_parallel_size", "choose a tensor"),
        ("/v1/plans", {"objective": "cost"}, "price", "give the price of a device-hour"),
        ("/v1/plans", {"share": 0.5}, "share", "leave it out"),
        ("/v1/plans", {"goodput": {"spares": 2}}, "goodput", "choose that objective"),
        ("/v1/plans", {"objective": "goodput", "goodput": {"spare": 2}}, "goodput", "use one of failures"),
        ("/v1/plans", {"objective": "goodput", "goodput": {"spares": -1}}, "goodput.spares", "give 0 or more"),
        (
            "/v1/plans",
            {"objective": "goodput", "goodput": {"failures": "/etc/log.csv"}},
            "goodput.failures",
            "use one of llama3",
        ),
        ("/v1/plans", {"memory_limit": 1_000_000_000, "space": "zero"}, "memory", "plan for more devices"),
        ("/v1/plans", {"rate": 1e12, "space": "zero"}, "rate", "lower it"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(client: TestClient, path: str, fields: Any, field: str, remedy: str) -> None:
    errors = problem(client, path, **fields)["errors"]
    assert field in [error["field"] for error in errors]
    assert all(remedy in error["remedy"] for error in errors)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/plans", {"objective": "speed"}), ("/v1/plans", {"top": 101}), ("/v1/plans", {"max": "layers"}),
        ("/v1/predictions", {"x": 1}),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_document_is_named(client: TestClient, path: str, fields: Any) -> None:
    assert next(iter(fields)) in problem(client, path, **fields)["errors"][0]["field"]


@pytest.mark.prove
def test_plans_stay_within_bounds(serve: Any) -> None:
    client = serve(plan_configurations=1000)
    told = problem(client, "/v1/plans", space="parallel")
    assert told["errors"][0]["message"] == "it has more than 1,000 configurations"
    client = serve(plan_seconds=0.001)
    assert problem(client, "/v1/plans", space="parallel")["errors"][0]["message"] == "it takes too long to rank"
    client = serve(count_steps=100)
    assert "more than 100 steps" in problem(client, "/v1/plans", space="parallel")["errors"][0]["message"]


@pytest.mark.prove
def test_the_largest_plans_end_in_time(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every knob with every value, over all sizes of a huge cluster, for the longest sequence: answered or refused."""
    monkeypatch.setattr("api.computing.CALL_SECONDS", 1.0)
    knobs = {
        "checkpoint_every_k": list(range(1, 100)),
        "micro_batch_size": list(range(1, 100)),
        "hsdp_shard_size": list(range(100)),
    }
    for fields in (
        {"space": "full", "cluster": "dgx-h100:100000", "global_batch_size": 2**32, "objective": "cost", "price": 1.0},
        {"space": "full", "cluster": "dgx-h100:4096", "global_batch_size": 2**20, "pins": knobs, "max": "sequence_length"},
    ):
        answer = client.post("/v1/plans", json=ASKED | fields)
        assert answer.status_code in (200, 422), answer.text


def test_keys_are_asked_for(serve: Any) -> None:
    client = serve(require_keys=True)
    for path in ("/v1/predictions", "/v1/plans"):
        assert problem(client, path, status=401)["title"] == "Unauthorized"
